"""``DeepSpeedEngine.load_checkpoint``. A job without the ``unickpt`` key runs DeepSpeed's own function."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ds_unickpt import batches, dialects, hints, internals, restore, trainer_folders
from ds_unickpt.batches import Batch
from ds_unickpt.engine import UnickptCheckpointEngine, ours_of
from ds_unickpt.restore_objects import LoadArguments
from unickpt.checkpoint_folder import complete_checkpoints
from unickpt.coordination.rendezvous import Rendezvous
from unickpt.errors import ConfigError, NotACheckpointError, UnickptError, UnsupportedLayoutError
from unickpt.format.manifest import MANIFEST_FILE
from unickpt.load.candidates import Candidates
from unickpt.load.checkpoint import Checkpoint
from unickpt.load.failure import DAMAGE, failure_of
from unickpt.load.resume import Offer, Together, resume
from unickpt.load.validation import is_checkpoint
from unickpt.save import shutdown
from unickpt.storage.base import Storage, is_url, join
from unickpt.storage.open import open_storage

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
) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``. The arguments have the same meaning; the saved layout may differ.

    Returns:
        ``(path of the manifest, client_state)``. ``(None, None)``, as DeepSpeed returns it, if there is no ``latest`` file
        and no tag is given.

    Raises:
        UnickptError: the checkpoint is damaged or does not fit, or a rank failed. All ranks raise.
    """
    ours = ours_of(engine)
    wanted = LoadArguments(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only,
        scheduler=load_lr_scheduler_states and not load_module_only,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )

    def run_native(tag: Any) -> Any:
        return native(
            load_dir,
            tag=tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    if ours is None:
        try:
            return run_native(tag)
        except Exception as err:
            hint = hints.without_the_key(load_dir, tag)
            if hint:
                raise ConfigError(hint) from err
            raise
    shutdown.finish_all()
    ours.meet.begin("load")
    folder, candidates = str(load_dir), Candidates(load_dir)
    of_trainer = "transformers.trainer" in sys.modules and not is_url(folder) and trainer_folders.is_one(folder)

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> Any:
        if offer.native:
            return run_native(tag)
        loaded = _load(ours, engine, join(folder, offer.name) if offer.name else folder, wanted, skipped)
        _warn_of_batch(ours, engine, wanted, loaded[1].get("ds_config"), of_trainer)
        if of_trainer and ours.meet.rank == 0:
            trainer_folders.forget_damage(folder)
        return loaded

    def nothing(offer: Offer) -> Any:
        if ours.meet.rank == 0 and offer.present:
            logger.warning(
                "unickpt: %s has no 'latest' file, so nothing is loaded. It has these complete checkpoints: %s. "
                "To resume from one, pass its name as tag.", folder, ", ".join(offer.present),
            )  # fmt: skip
        if is_url(folder):
            if ours.meet.rank == 0 and not offer.present:
                logger.warning("unickpt: %s has no 'latest' file and no checkpoint, so nothing is loaded", folder)
            return None, None
        if of_trainer and trainer_folders.has_our_files(folder):
            raise NotACheckpointError(f"{folder} has no 'latest' file, so its save did not finish")
        return run_native(tag)

    try:
        return resume(
            ours.meet,
            lambda: _offer(candidates, folder, tag),
            attempt,
            nothing,
            where=folder,
            fall_back=ours.options.fall_back,
        )
    except UnickptError as err:
        if not of_trainer or failure_of(err, rank=ours.meet.rank, where=folder).kind not in DAMAGE:
            raise
        raise _of_trainer(err, folder, first=ours.meet.rank == 0) from err.__cause__


def _warn_of_batch(ours: UnickptCheckpointEngine, engine: Any, wanted: LoadArguments, saved: Any, of_trainer: bool) -> None:
    """Warn if the global batch size differs from the checkpoint's. DeepSpeed does not compare them."""
    if ours.meet.rank or wanted.module_only or not isinstance(saved, Mapping):
        return
    total, per_device, accumulation = (
        int(value())
        for value in (engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps)
    )
    now = Batch(total, per_device, accumulation, max(total // (per_device * accumulation), 1))
    before = batches.of_config(saved, int(engine.loaded_checkpoint_dp_world_size or 1))
    warning = batches.changed(before, now, step=int(engine.global_steps), trainer=of_trainer)
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


def _offer(candidates: Candidates, load_dir: str, tag: Any) -> Offer:
    """Return the checkpoint to load next. Runs on the coordinator. Reads manifests, no data."""
    folder = open_storage(load_dir)
    if tag is not None:
        return Offer(join(load_dir, str(tag)), str(tag), explicit=True, native=_is_native(folder.subfolder(str(tag))))
    if not candidates.begun and is_checkpoint(load_dir):  # not a folder of checkpoints
        return Offer(load_dir, explicit=True)
    native = not candidates.begun
    choice = candidates.next()
    if choice.tag is None:
        return Offer(present=tuple(name for _, name in complete_checkpoints(load_dir)), notes=choice.notes)
    native = native and _is_native(folder.subfolder(choice.tag))
    return Offer(join(load_dir, choice.tag), choice.tag, native=native, notes=choice.notes)


def _is_native(directory: Storage) -> bool:
    """Whether DeepSpeed itself made the last save under this tag."""
    native = [directory.modified_ns(name) for name in directory.names() if name.endswith(".pt")]
    if not native or not is_checkpoint(directory.where()):
        return bool(native)
    return max(native) > directory.modified_ns(MANIFEST_FILE)


def _load(
    ours: UnickptCheckpointEngine, engine: Any, directory: str, wanted: LoadArguments, skipped: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    begin = time.monotonic()
    together = Together(ours.meet, directory)

    def opened() -> restore.EngineRestore:
        reason = internals.unsupported_reason(engine)
        if reason:
            raise UnsupportedLayoutError(
                f"{directory} is a unickpt checkpoint. This job uses {reason}, which unickpt does not support yet."
            )
        checkpoint = dialects.as_named_here(Checkpoint.open(directory), engine, ours.options.load_dialect)
        loading = restore.EngineRestore(engine, checkpoint, ours.options, wanted)
        if not loading.placed.partial:
            loading.settle(loading.matching.unclaimed)
        internals.before_restore(engine)
        return loading

    loading = together.step("open", opened)
    if loading.placed.partial:
        unclaimed = _unclaimed(ours.meet, loading)
        together.step("match", lambda: loading.settle(unclaimed))
    planned, opener = together.plan(
        loading.plan, identity=lambda: loading.checkpoint.identity, share=ours.options.read_once_per_host
    )
    together.read(lambda host_peers: loading.read(planned, host_peers), opener)
    together.step("set", loading.set_tensors)
    client_state = together.step("finish", loading.finish)
    report = loading.report
    report.skipped = list(skipped)
    report.seconds = time.monotonic() - begin
    ours.last_report = report
    if ours.meet.rank == 0:
        for line in report.lines():
            logger.info("unickpt: %s", line)
    return join(directory, MANIFEST_FILE), client_state


def _unclaimed(meet: Rendezvous, loading: restore.EngineRestore) -> list[str]:
    """Return the names of the checkpoint that no rank of this job claims. The first rank of each stage sends its own."""
    gathered = meet.gather("claims", {"claimed": loading.matching.claimed if loading.placed.first else []})
    found = None
    if gathered is not None:
        claimed = {name for message in gathered for name in message["claimed"]}
        found = {"unclaimed": [name for name in loading.matching.known if name not in claimed]}
    unclaimed: list[str] = meet.broadcast("unclaimed", found, notice=False)["unclaimed"]
    return unclaimed
