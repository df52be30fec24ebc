"""``DeepSpeedEngine.load_checkpoint``. A job without the ``unickpt`` key runs DeepSpeed's own function."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.batch import batches
from ds_unickpt.compressing.compression import RestoredResiduals
from ds_unickpt.compressing.optimizer_residuals import RestoredOptimizerResiduals
from ds_unickpt.engine import UnickptCheckpointEngine, ours_for
from ds_unickpt.framework import internals
from ds_unickpt.loading import dialects, other_layouts, restore
from ds_unickpt.loading.restore_objects import LoadArguments
from ds_unickpt.loops import trainer_folders
from ds_unickpt.placing.fallbacks import require_supported
from ds_unickpt.saving import hints
from ds_unickpt.trainer import trainer_resume
from unickpt.base.errors import ConfigError, FormatError, MismatchError, NotACheckpointError, UnickptError, UnsafePathError
from unickpt.base.garbage import collection_paused
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints, latest_tag, plain_tag, read_manifest
from unickpt.checkpoint.coordination.host_peers import HostMemory
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.load.resume import Offer, Together, resume
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.memory.tier import MemoryLoad, choose
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.state.filling import shapes_of_all
from unickpt.checkpoint.storage.base import Storage, is_url, join
from unickpt.checkpoint.storage.open import open_storage
from unickpt.diagnosis import session

logger = logging.getLogger("unickpt")


def load_checkpoint(
    native: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    *,
    newest: bool = False,
) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``. The arguments have the same meaning; the saved layout may differ.

    Args:
        newest: without a ``latest`` file load the newest complete checkpoint. Checkpoints that cannot be loaded are an error.
            ``ds_unickpt.resume_or_start`` passes it.

    Returns:
        ``(path of the manifest, client_state)``. ``(None, None)``, as DeepSpeed returns it, if there is no ``latest`` file
        and no tag is given.

    Raises:
        UnickptError: the checkpoint is damaged or does not fit, or a rank failed. All ranks raise.
    """
    ours = ours_for(engine)
    wanted = LoadArguments(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )

    def run_native(tag: Any) -> Any:
        try:
            return native(
                load_dir,
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
        except Exception as err:
            hint = "" if ours is not None else hints.without_the_key(load_dir, tag)
            if hint:
                raise ConfigError(hint) from err
            told = other_layouts.with_advice(err, engine, load_dir, tag, enabled=ours is not None)
            if told is err:
                raise
            raise told from err.__cause__

    if ours is None:
        return run_native(tag)
    shutdown.finish_all(ending=False)
    ours.exchange.begin("load")
    folder, candidates = str(load_dir), Candidates(load_dir, newest=newest)
    of_trainer = "transformers.trainer" in sys.modules and not is_url(folder) and trainer_folders.is_one(folder)
    resumed = trainer_resume.resumed_in(folder) if of_trainer and ours.memory.enabled else None
    tier = folder if not of_trainer else trainer_resume.run_of(folder) if resumed is None else resumed.run
    memory = ours.memory.look(tier, ours.exchange) if ours.memory.enabled else MemoryLoad()
    tried: list[tuple[int, bool]] = []
    if memory.problems and ours.exchange.rank == 0:
        logger.warning("unickpt: in the memory of the hosts: %s", "; ".join(memory.problems))

    def offer() -> Offer:
        if resumed is not None:
            return trainer_resume.offer(resumed, memory, folder, tried)
        found = choose(memory, lambda: _disk_step(folder), tried) if tag is None and not of_trainer else None
        if found is None:
            return _offer(candidates, folder, tag, newest)
        generation, checked = found
        directory = join(folder, generation.tag)
        return Offer(directory, generation.tag, generation.step, generation=generation.number, checked=checked)

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> Any:
        if offer.native:
            return run_native(tag)
        directory = join(folder, offer.name) if offer.name else folder

        def opened() -> Checkpoint:
            if not offer.generation:
                return Checkpoint.open(directory)
            return ours.memory.open(tier, memory, offer.generation)

        if offer.checked:
            Together(ours.exchange, directory).step("check", lambda: ours.memory.check(tier, offer.generation))
        loading, client_state = _load(ours, engine, directory, opened, wanted, skipped)
        read = ours.memory.loaded(tier, memory, loading.checkpoint.manifest.step, offer.generation)
        if read and ours.exchange.rank == 0:
            logger.info("unickpt: %s was loaded from the memory of the hosts: rank 0 read %s", directory, read)
        newer = [found.step for found in memory.found if found.step > (loading.checkpoint.manifest.step or 0)]
        if newer and ours.exchange.rank == 0:
            logger.warning("unickpt: checkpoints in memory of later steps (%s) were given up", ", ".join(map(str, newer)))
        if not wanted.module_only and ours.exchange.rank == 0:
            _log_batch(engine, loading, of_trainer)
        if of_trainer and ours.exchange.rank == 0:
            trainer_folders.forget_damage(folder)
        return join(directory, MANIFEST_FILE), client_state

    def nothing(offer: Offer) -> Any:
        if ours.exchange.rank == 0 and offer.present:
            logger.warning(
                "unickpt: %s has no 'latest' file, so nothing is loaded. It has these complete checkpoints: %s. "
                "To resume from one, pass its name as tag.", folder, ", ".join(offer.present),
            )  # fmt: skip
        if is_url(folder):
            if ours.exchange.rank == 0 and not offer.present:
                logger.warning("unickpt: %s has no 'latest' file and no checkpoint, so nothing is loaded", folder)
            return None, None
        if of_trainer and trainer_folders.has_our_files(folder):
            raise NotACheckpointError(f"{folder} has no 'latest' file, so its save did not finish")
        return (None, None) if newest else run_native(tag)

    try:
        return resume(
            ours.exchange,
            offer,
            attempt,
            nothing,
            where=folder,
            fall_back=ours.options.fall_back,
        )
    except UnickptError as err:
        if not of_trainer or failure_of(err, rank=ours.exchange.rank, where=folder).kind not in DAMAGE:
            raise
        if resumed is not None:
            ours.memory.drop(tier, resumed.generation)
            raise
        raise _of_trainer(err, folder, first=ours.exchange.rank == 0) from err.__cause__


def _log_batch(engine: Any, loading: restore.EngineRestore, of_trainer: bool) -> None:
    """Log what changed since the checkpoint. Warn if the global batch size changed: DeepSpeed does not compare them."""
    before, now, step = loading.saved_batch(), batches.of_engine(engine), int(engine.global_steps)
    worlds = loading.checkpoint.manifest.writer.topology.get("world_size"), int(engine.world_size)
    line = batches.resumed(before, now, step=step, samples=int(engine.global_samples), worlds=worlds)
    logger.info("unickpt: %s", line)
    warning = batches.changed(before, now, step=step, trainer=of_trainer)
    if warning:
        logger.warning("unickpt: %s", warning)


def _of_trainer(error: UnickptError, folder: str, *, first: bool) -> UnickptError:
    """Return the error for a damaged ``checkpoint-N`` folder, and mark the folder as damaged.

    Trainer has read its own state from the folder before DeepSpeed finds the damage, so this load cannot fall back.
    """
    if first:
        trainer_folders.note_damage(folder, str(error))
    advice = trainer_folders.advice(folder) or "No other folder of this run can be resumed."
    text = f"{error} {folder} is marked as damaged, so resume_from_checkpoint=True skips it from now on. {advice}"
    return type(error)(text).about(file=error.file, tensor=error.tensor)


def _offer(candidates: Candidates, load_dir: str, tag: Any, newest: bool) -> Offer:
    """Return the checkpoint to load next. Runs on the coordinator. Reads manifests, no data."""
    folder = open_storage(load_dir)
    if tag is not None:
        try:
            tag = plain_tag(str(tag), load_dir)
        except UnsafePathError as err:
            return Offer(refused=str(err))
        return Offer(join(load_dir, str(tag)), str(tag), explicit=True, native=_is_native(folder.subfolder(str(tag))))
    if not candidates.begun and is_checkpoint(load_dir):  # not a folder of checkpoints
        return Offer(load_dir, explicit=True)
    native = not candidates.begun
    choice = candidates.next()
    if choice.tag is None and newest:
        return Offer(notes=(*choice.notes, *unnamed(folder)))
    if choice.tag is None:
        return Offer(present=tuple(name for _, name in complete_checkpoints(load_dir)), notes=choice.notes)
    native = native and _is_native(folder.subfolder(choice.tag))
    return Offer(join(load_dir, choice.tag), choice.tag, native=native, notes=choice.notes)


def _disk_step(folder: str) -> int | None:
    """Return the step of the checkpoint that ``latest`` names, or of the newest one. None if there is none.

    The step of a checkpoint of DeepSpeed itself is not known; it counts as newer than any in memory.
    """
    try:
        named = latest_tag(folder)
    except FormatError:  # the candidates on disk say so
        named = None
    if named is None:
        return next((step for step, _ in complete_checkpoints(folder)), None)
    try:
        return read_manifest(open_storage(folder).subfolder(named)).step
    except NotACheckpointError:
        return sys.maxsize if _is_native(open_storage(folder).subfolder(named)) else None
    except FormatError:
        return None


def unnamed(folder: Storage) -> list[str]:
    """Return why the checkpoints of a folder cannot be loaded, although neither ``latest`` nor a manifest names one.

    A save that did not finish is no checkpoint. One with a sound manifest was tried before, and its damage is known.
    """
    found = []
    for name in folder.folders():
        inside = folder.subfolder(name)
        if is_checkpoint(inside.where()):
            try:
                read_manifest(inside)
            except FormatError:
                found.append(f"{inside.where()} has a damaged manifest")
        elif any(file.endswith("_states.pt") for file in inside.names()):
            found.append(f"DeepSpeed wrote {inside.where()}, and no 'latest' file names it")
    return found


def _is_native(directory: Storage) -> bool:
    """Whether DeepSpeed itself made the last save under this tag."""
    native = [directory.modified_ns(name) for name in directory.names() if name.endswith(".pt")]
    if not native or not is_checkpoint(directory.where()):
        return bool(native)
    return max(native) > directory.modified_ns(MANIFEST_FILE)


@collection_paused()
def _load(
    ours: UnickptCheckpointEngine, engine: Any, directory: str, source: Callable[[], Checkpoint], wanted: LoadArguments,
    skipped: tuple[str, ...],
) -> tuple[restore.EngineRestore, dict[str, Any]]:  # fmt: skip
    begin = time.monotonic()
    together = Together(ours.exchange, directory)
    whole = wanted.optimizer and internals.base_optimizer(engine) is not None

    def own() -> dialects.Shapes:
        require_supported(engine, for_load=directory)
        return dialects.wanted_here(engine)

    wanted_names: dialects.Shapes | None = None
    if engine.pipeline_parallelism or engine.has_moe_layers:  # a rank may have a part of the tensors
        wanted_names = shapes_of_all(together.step("names", own), ours.exchange)

    def opened() -> restore.EngineRestore:
        require_supported(engine, for_load=directory)
        stored = source()
        if whole and ours.exchange.rank == 0:
            _check_owner(ours, stored, directory)
        checkpoint = dialects.as_named_here(stored, engine, ours.options.load_dialect, wanted_names)
        loading = restore.EngineRestore(engine, checkpoint, ours.options, wanted, ours.beginning)
        if not loading.placed.partial:
            loading.settle(loading.matching.unclaimed)
        internals.before_restore(engine)
        return loading

    loading = together.step("open", opened)
    if ours.choosing is not None and wanted.optimizer:
        choosing = ours.choosing
        together.step("compression", lambda: choosing.restore(engine, loading.checkpoint))
    residuals = RestoredResiduals(ours.compressed, loading.checkpoint, wanted=wanted.optimizer)
    if loading.placed.partial:
        unclaimed = _unclaimed(ours.exchange, loading)
        together.step("match", lambda: loading.settle(unclaimed))
    planned, opener = together.plan(
        loading.plan, identity=lambda: loading.checkpoint.identity, share=ours.options.read_once_per_host
    )
    errors = RestoredOptimizerResiduals(engine, loading.checkpoint, loading.parts, loading.stored_name, wanted=wanted.optimizer)
    with HostMemory(opener) as memory:

        def read() -> None:
            memory.use(partial(loading.read, planned))
            residuals.read()
            errors.read()

        def set_all() -> dict[str, Any] | None:
            memory.use(loading.set_tensors)
            return None if loading.finishes_together else loading.finish()

        together.step("read", read)
        loading.agree(ours.exchange)
        client_state = together.step("set", set_all)
    if client_state is None:
        client_state = together.step("finish", loading.finish)
    if whole:
        ours.owners.adopt(ours.owner, Origin.of(loading.checkpoint.manifest))
    report = loading.report
    residuals.apply(report)
    errors.apply(report)
    report.skipped = list(skipped)
    report.seconds = time.monotonic() - begin
    ours.last_report = report
    session.checkpoint_io(report.io_times(loading.checkpoint.manifest.step or 0))
    if ours.exchange.rank == 0:
        for line in report.lines():
            logger.info("unickpt: %s", line)
    if loading.placed.first and loading.fresh_line:
        logger.warning("unickpt: %s: %s", loading.checkpoint.storage, loading.fresh_line)
    return loading, client_state


def _check_owner(ours: UnickptCheckpointEngine, checkpoint: Checkpoint, directory: str) -> None:
    """Raise MismatchError if the checkpoint is one of another model of this job, and warn if it may be one."""
    refused = ours.owners.load_refusal(ours.owner, checkpoint.manifest)
    if refused:
        raise MismatchError(f"{directory}: {refused}")
    notice = ours.owners.load_notice(ours.owner, checkpoint.manifest)
    if notice:
        logger.warning("unickpt: %s: %s", directory, notice)


def _unclaimed(exchange: MessageExchange, loading: restore.EngineRestore) -> list[str]:
    """Return the names of the checkpoint that no rank of this job claims. Every rank gets the misfits of all ranks.

    The first of the ranks with the same parameters sends what it uses. Each rank sends its misfits, because tensor-parallel
    ranks may have other shapes.
    """
    own = loading.matching
    found = {"claimed": own.claimed if loading.placed.first else [], "missing": own.missing, "shapes": own.shapes}

    def everyones(messages: list[Message]) -> Message:
        claimed, missing, shapes = ([name for message in messages for name in message[key]] for key in found)
        known = set(claimed)
        unclaimed = [name for name in own.known if name not in known]
        return {"unclaimed": unclaimed, "missing": list(dict.fromkeys(missing)), "shapes": list(dict.fromkeys(shapes))}

    result = exchange.combined("claims", found, everyones)
    own.missing, own.shapes = result["missing"], result["shapes"]
    names: list[str] = result["unclaimed"]
    return names
