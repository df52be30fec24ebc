"""``save`` and ``load`` for programs that use megatron-core as a library: training loops, Ray actors, notebooks.

They need no global arguments and fork no process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import random as tracker_module

from megatron_unickpt.dist_checkpointing import loading, masters, saving
from megatron_unickpt.dist_checkpointing.lacking import Fit
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework import internals
from megatron_unickpt.framework.errors import MegatronCheckpointError, MegatronSaveError, as_agreed_failures, as_megatron_errors
from megatron_unickpt.held_state.common_state import VOCABULARY
from megatron_unickpt.held_state.foreign_state import Receiver
from megatron_unickpt.held_state.optimizer import METADATA
from megatron_unickpt.pretraining import schedule
from megatron_unickpt.pretraining.choices import step_of
from megatron_unickpt.witnessing import replaying
from unickpt.api.arguments import path_of
from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger
from unickpt.base.options.job import MISSING, MemoryOptions
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.replayed import layout_of, replayed, replays
from unickpt.checkpoint.load.resume import Offer, Together, resume
from unickpt.checkpoint.memory.offers import MemoryResume
from unickpt.checkpoint.memory.tier import MemoryTurn
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.storage.base import absolute, join, split
from unickpt.diagnosis import session

_RNG = "unickpt_rng"


def save(
    directory: str | Path,
    model: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    iteration: int = 0,
    extra: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    asynchronous: bool = False,
    vocabulary: int | None = None,
    memory: MemoryOptions | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Save a model and its optimizer. All ranks call it.

    Args:
        directory: path or URL of this checkpoint; created if it does not exist.
        model: megatron-core module, wrapped (DDP, Float16Module) or not; or the list of a rank's model chunks.
        optimizer: optimizer of megatron-core, chained or not.
        scheduler: object with ``state_dict``.
        iteration: stored with the checkpoint.
        extra: further values, the same on all ranks (rank 0's are stored).
        metadata: passed to the model's ``sharded_state_dict``.
        asynchronous: return after this rank's part is copied to host memory; see Returns.
        vocabulary: number of entries of the tokenizer, without padding. A later job with fewer padding rows can load the
            checkpoint only if it is known.
        memory: save into the memory of the hosts, and return after the copy, except every ``to_disk_every``-th time.
            ``resume_or_start`` finds the checkpoint.
        group: process group of the ranks that call it, if they are not all ranks of the job. They hold the first copy of
            every part of the model and the optimizer.
        timeout_s: seconds to wait for the other ranks; None: ``--unickpt-timeout-seconds``, or 1800. The end of the process
            of a rank ends the wait in seconds, except that of a killed process on another host.

    Returns:
        None; with ``asynchronous`` a ``MegatronSave``: call its ``conclude()`` on every rank before the next save.

    Raises:
        MegatronSaveError: on every rank, if any rank could not write, or if the state of any rank could not be described.
        ConfigError: ``directory`` is no path, ``vocabulary`` is not a positive integer, or this process is not in the group.
    """
    directory = path_of(directory, order="directory, model, optimizer")
    with RUNTIME.among(group, timeout_s):
        if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
            raise ConfigError(f"vocabulary={vocabulary!r}: expected the number of the tokenizer's entries, a positive integer")
        alone = _is_a_part(group)
        described = {**(metadata or {}), **METADATA}
        save_dir = split(absolute(directory))[0]
        tier = None if memory is None else RUNTIME.memory(memory, RUNTIME.saver().options, save_dir)
        turn = tier.turn(save_dir, RUNTIME.exchange()) if tier is not None and tier.enabled else None

        def saved(turn: MemoryTurn | None) -> Any:
            try:
                state = _state(model, optimizer, scheduler, metadata, is_loading=False)
            except Exception as err:
                raise saving.refuse(RUNTIME, err, turn=turn) from err  # the other ranks wait for this one
            state |= {"iteration": iteration, "extra": extra or {}}
            if vocabulary is not None:
                state[VOCABULARY] = vocabulary
            return saving.save(
                RUNTIME, state, directory, content_metadata=described, asynchronous=asynchronous,
                validate_access_integrity=not alone,  # a collective of all ranks
                share=not alone,  # copies of ranks that may not call
                turn=turn,
            )  # fmt: skip

        try:
            request = saved(turn)
        except MegatronSaveError:
            if turn is None:
                raise
            request = saved(None)
        return request.finalize_fns.pending if asynchronous else None


def _is_a_part(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group has fewer ranks than the job."""
    return group is not None and dist.get_world_size(group) < dist.get_world_size()


def load(
    directory: str | Path,
    model: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    metadata: dict[str, Any] | None = None,
    strict: bool = True,
    load_dialect: str = "",
    missing_state: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of ``save``, under any parallel shape and optimizer wrapper. All ranks call it.

    Checkpoints of other frameworks load as well. A scheduler of Megatron is then set to their number of trained samples.

    Args:
        directory, model, optimizer, scheduler, metadata: as for ``save``. Without ``optimizer`` its states are not loaded, and
            the masters of an optimizer of this process get the values of the loaded weights.
        strict: passed to the modules' ``load_state_dict``. False also allows parameters that only the checkpoint has, which
            are left out, and parameters that only the model has, which keep their values.
        load_dialect: model family such as ``llama``, or path of a [dialect](../dialect-language.md) file, for a checkpoint of
            another framework whose family is unknown.
        missing_state: ``error`` or ``fresh``: what to do about optimizer states that the checkpoint lacks. None:
            ``--unickpt-missing-state``, or ``error``.
        group, timeout_s: as for ``save``.

    Returns:
        ``{"iteration": ..., "extra": ...}``.

    Raises:
        MegatronCheckpointError: the checkpoint is damaged or does not fit.
        ConfigError: ``directory`` is no path.
    """
    directory = path_of(directory, order="directory, model, optimizer")
    with RUNTIME.among(group, timeout_s):
        directory = _instead(directory)
        found = _load(
            directory, model, optimizer, scheduler=scheduler, metadata=metadata, strict=strict, load_dialect=load_dialect,
            missing_state=missing_state,
        )  # fmt: skip
    _replay(directory, model, optimizer)
    return found


def resume_or_start(
    folder: str | Path,
    model: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    metadata: dict[str, Any] | None = None,
    strict: bool = True,
    memory: MemoryOptions | None = None,
    load_dialect: str = "",
    missing_state: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Load the newest complete checkpoint of a folder, or start without one if there is none. All ranks call it.

    Args:
        folder: path or URL of the folder in which ``save`` has made its checkpoints. It need not exist.
        model, optimizer, scheduler, metadata, strict, load_dialect, missing_state: as for ``load``.
        memory: also look for checkpoints in the memory of the hosts.
        group, timeout_s: as for ``save``.

    Returns:
        As ``load``; iteration 0 and empty ``extra`` without a checkpoint.

    Raises:
        MegatronCheckpointError: there are checkpoints, but none can be loaded, or the newest one does not fit.
        ConfigError: ``folder`` is no path.
    """
    where = path_of(folder, order="folder, model, optimizer")
    with RUNTIME.among(group, timeout_s):
        shutdown.finish_all(ending=False)
        exchange = RUNTIME.exchange()
        exchange.begin("choose")
        tier = RUNTIME.memory(memory or MemoryOptions(), RUNTIME.saver().options, where)
        in_memory = MemoryResume(tier, where, exchange)
        candidates = Candidates(where, newest=True)

        def on_disk() -> Offer:
            found = candidates.next()
            if found.tag is None:
                return Offer(notes=found.notes)
            directory = join(where, found.tag)
            return Offer(directory, found.tag, step_of(directory), found.notes)

        def attempt(offer: Offer, _: tuple[str, ...]) -> dict[str, Any]:
            if offer.checked:
                Together(exchange, offer.directory).step("check", partial(in_memory.check, offer))
            with as_agreed_failures():
                found = _load(
                    offer.directory, model, optimizer, scheduler=scheduler, metadata=metadata, strict=strict,
                    source=partial(in_memory.open, offer), load_dialect=load_dialect, missing_state=missing_state,
                )  # fmt: skip
            in_memory.loaded(offer, offer.step)
            loaded.append(offer.directory)
            return found

        loaded: list[str] = []
        offers = in_memory.offers(on_disk, lambda: -1)
        with as_megatron_errors():
            found = resume(exchange, offers.next, attempt, lambda _: {"iteration": 0, "extra": {}}, where=where)
        _note_resumed(model, where)
        session.stands_at(int(found["iteration"]))
    if loaded:
        _replay(loaded[-1], model, optimizer)
    return found


def _instead(directory: str | Path) -> str | Path:
    """Return the checkpoint that ``unickpt replay-step`` wants, if it has started this process and the folder is its own.

    Raises:
        MegatronCheckpointError: there is no such checkpoint.
    """
    request = replays(str(directory))
    found = None if request is None else replayed(request, str(directory))
    if found is None:
        return directory
    if found.refused:
        raise MegatronCheckpointError(found.refused)
    return found.directory


def _replay(directory: str | Path, model: Any, optimizer: Any) -> None:
    """Record the steps after a load, if ``unickpt replay-step`` has started this process."""
    request = replays(str(directory))
    if request is not None:
        replaying.begin(RUNTIME, request, model, optimizer, layout_of(str(directory)))


def _note_resumed(model: Any, folder: str) -> None:
    """Note the folder of a model's checkpoints for its witness, which begins later."""
    first = next((each for chunk in _chunks(model).values() for each in chunk.parameters()), None)
    RUNTIME.resumed = [(known, other) for known, other in RUNTIME.resumed if known() is not None and known() is not first]
    if first is not None:
        RUNTIME.resumed.append((ref(first), absolute(folder)))


def _load(
    directory: str | Path, model: Any, optimizer: Any, *, scheduler: Any, metadata: dict[str, Any] | None, strict: bool,
    source: Callable[[], Checkpoint] | None = None, load_dialect: str = "", missing_state: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    if missing_state not in (None, *MISSING):
        raise ConfigError(f"missing_state={missing_state!r}: expected one of {', '.join(MISSING)}")
    try:
        state = _state(model, optimizer, scheduler, metadata, is_loading=True)
    except Exception as err:  # the other ranks wait for this one
        with as_megatron_errors():
            loading.begin_together(RUNTIME, directory).agree("open", err)
        raise
    receiver = Receiver(scheduler=scheduler)
    loaded = loading.load(
        RUNTIME, state, directory, receiver=receiver, adapt=_with_stored_generators, source=source, load_dialect=load_dialect,
        fit=Fit.EQUAL if strict else Fit.COMMON, missing_state=missing_state,
    )  # fmt: skip
    chunks = _chunks(model)
    for key, chunk in chunks.items():
        chunk.load_state_dict(loaded[key], strict=strict)
    with schedule.own_bounds(optimizer, scheduler):
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            masters.follow_weights(p for chunk in chunks.values() for p in chunk.parameters())
        if scheduler is not None and "scheduler" in loaded:
            scheduler.load_state_dict(loaded["scheduler"])
        elif scheduler is not None:
            logger.warning("unickpt: %s has no state of a scheduler. The scheduler keeps its own.", directory)
    if _RNG in loaded:
        _note_lacking(rng.restore(loaded[_RNG]["generators"]))
        tracker_module.get_cuda_rng_tracker().set_states(loaded[_RNG]["trackers"])
    elif RUNTIME.last_report is not None:
        RUNTIME.last_report.add("rng", "object", "left out", "the checkpoint has none: this job's own keep their state")
    return {"iteration": loaded.get("iteration", 0), "extra": loaded.get("extra", {})}


def _note_lacking(generators: Sequence[str]) -> None:
    """Report generators of a checkpoint that this process does not have, such as another bit generator of NumPy."""
    if generators and RUNTIME.last_report is not None:
        RUNTIME.last_report.add("rng", "object", "left out", f"this process has no {', '.join(generators)} generator")
        logger.warning(
            "unickpt: this process has no %s generator. Its own keeps its state; the other random generators are restored.",
            ", ".join(generators),
        )


def _with_stored_generators(checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
    """Do not load random generators if the checkpoint has none, as one of the training scripts or of another framework."""
    stored = any(name.startswith(f"{_RNG}/") for name in checkpoint.shared_names())
    return state if stored else {key: value for key, value in state.items() if key != _RNG}


def _chunks(model: Any) -> dict[str, Any]:
    chunks = list(model) if isinstance(model, Sequence) else [model]
    return {"model" if len(chunks) == 1 else f"model{at}": _unwrapped(chunk) for at, chunk in enumerate(chunks)}


def _unwrapped(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module


def _state(model: Any, optimizer: Any, scheduler: Any, metadata: dict[str, Any] | None, *, is_loading: bool) -> dict[str, Any]:
    given = metadata or {}
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=dict(given)) for key, chunk in _chunks(model).items()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata={**given, **METADATA})
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    generators = {"generators": rng.capture(), "trackers": tracker_module.get_cuda_rng_tracker().get_states()}
    state[_RNG] = ShardedObject(_RNG, generators, *_position(), replica_id=0)
    return state


def _position() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the sizes of the pipeline, tensor and data parallel dimensions, and this rank's position in them."""
    sizes, place = internals.topology(), internals.coordinates()
    pipeline, tensor = sizes.get("pipeline", 1), sizes.get("tensor", 1)
    shape = (pipeline, tensor, max(sizes["world_size"] // (pipeline * tensor), 1))
    return shape, (place["pipeline"], place["tensor"], place["data"])
