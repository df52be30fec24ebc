"""``save_training`` for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from torch_unickpt.edge import RUNTIME
from torch_unickpt.held_state import module_states
from torch_unickpt.held_state.arguments import check_objects
from torch_unickpt.held_state.job_objects import JobObjects, schedulers_of
from torch_unickpt.held_state.known_training import TrainingState, trained
from torch_unickpt.held_state.names import Names, facts_of, topology_of
from torch_unickpt.held_state.optimizers import unwrapped
from torch_unickpt.held_state.samples import different, message
from unickpt import __version__
from unickpt.api.arguments import check_kind, path_of
from unickpt.api.group import Group, exchange_of
from unickpt.api.holders import Holders, agreed_holders
from unickpt.base.errors import SaveFailedError
from unickpt.base.garbage import collection_paused
from unickpt.base.listing import some
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.format.manifest import OptimizerRecord, Writer
from unickpt.checkpoint.format.object_encoder import digest_of
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.state.client_states import CLIENT
from unickpt.checkpoint.storage.base import absolute, split
from unickpt.diagnosis import session
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, OWN


def save_training(
    model: torch.nn.Module,
    optimizer: Any,
    directory: str | os.PathLike[str],
    *,
    step: int,
    samples: int | None = None,
    scheduler: Any = None,
    loader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    options: SaveOptions | None = None,
    memory: MemoryOptions | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> SaveResult | PendingSave:
    """Save model, optimizer and everything else that a training needs to go on. Every rank calls it.

    Nothing is gathered. Each rank writes what it holds, and of copies an equal part.

    Example:
        ```python
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        start = torch_unickpt.resume_or_start(model, optimizer, "out")
        for step in range(start.step, steps):
            ...
            unickpt.save_training(model, optimizer, f"out/step{step + 1}", step=step + 1)
        ```

    Args:
        model: any module: plain, ``fully_shard`` (FSDP2, HSDP), tensor parallel, ``DistributedDataParallel``, compiled.
        optimizer: one of ``torch.optim`` or of its form, several of them, or None.
        directory: checkpoint directory, ``<save_dir>/<tag>``. A path or a URL.
        step: optimizer steps done. The same on all ranks.
        samples: samples of these steps over all ranks, for a job with another batch size or in another framework.
        scheduler: learning-rate scheduler, or several.
        loader: data loader of this rank with ``state_dict``. See ``ReshardableLoader``.
        stateful: further objects with ``state_dict`` and ``load_state_dict``, by name. Rank 0's states are stored.
        client_state: further values ([types](../format.md#8-objects)): rank 0's, and on the same number of ranks each rank's
            own.
        save_latest: write the tag to ``<save_dir>/latest``.
        options: retention, upload, ``asynchronous``.
        memory: save [into the memory of the hosts](../../guides/memory.md), and each ``to_disk_every``-th time to disk. The
            same at each save, and in ``resume_or_start``.
        group: process group. None: the default group, or this process alone if ``torch.distributed`` is not initialised.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        Size and time; the checkpoint is durable. With ``asynchronous``, and of a save into memory, a handle, as soon as the
        state is copied.

    Raises:
        ConfigError: ``directory``, ``model``, ``options`` or ``memory`` is something else. Nothing was written.
        SaveFailedError: no checkpoint was written. It is raised on every rank and names rank and cause. Earlier checkpoints
            are intact.
        CoordinationError: a rank did not make the call within ``timeout_s``.
    """
    make_visible()
    place = path_of(directory, order="model, optimizer, directory")
    options = SaveOptions() if options is None else options
    check_kind("model", model, torch.nn.Module)
    check_kind("options", options, SaveOptions)
    if memory is not None:
        check_kind("memory", memory, MemoryOptions)
    step, samples = _counter(step), None if samples is None else _counter(samples)
    exchange, ranks = exchange_of(group, timeout_s=timeout_s, place=place), Group.of(group)
    objects = JobObjects(schedulers_of(scheduler), loader, stateful or {}, optimizer)
    failed: BaseException | None = None
    state: TrainingState | None = None
    try:
        check_objects(objects, client_state, method="state_dict")
        with collection_paused():
            state = RUNTIME.known(model).read(model, unwrapped(optimizer), ranks)
    except Exception as err:  # the other ranks learn it in the save
        failed = err
    holders = agreed_holders(exchange, None if state is None else state.keys, None if state is None else state.meshes)
    if ranks.rank == 0 or holders.others is not None:  # then the ranks may have other modules
        _tell(RUNTIME.known(model).own_entries or ())
    owner = RUNTIME.owner(model)
    assert RUNTIME.owners is not None
    origin = asdict(RUNTIME.owners.origin(owner))

    def announce() -> Message:
        return {"samples": message({} if state is None else state.samples()), CLIENT: digest_of(dict(client_state or {}))}

    def contribute(announced: Message) -> Contribution:
        assert state is not None
        own, left_out = objects.of_rank()  # first: code of the program runs on all ranks, and may raise afterwards
        silent = next(filter(None, map(silent_steps, state.optimizers.optimizers)), "")
        unsteady = silent if state.optimizers.optimizers else "the save has no optimizer"
        held = state.described(holders, steady=not unsteady)
        record = state.record()
        first = ranks.rank == 0
        extra = module_states.captured(state.names, holders, ranks.rank)
        _tell_of_optimizers(left_out if first else ())
        if not first and digest_of(dict(client_state or {})) != announced[CLIENT]:
            own[CLIENT] = dict(client_state or {})
        return Contribution(
            held.shards, step, _writer(model, state.names, len(ranks.ranks), origin), tensors=held.listed,
            optimizer=record if first else None, optimizer_part=None if first else _part(record, holders, ranks.rank),
            aliases=state.names.aliases, objects=objects.captured(step, samples, client_state or {}, extra) if first else {},
            shared_objects={} if first else module_states.shared(extra), rank_objects=own, unsteady=unsteady,
            bound=held.bound, keeper=held.keeper, different=() if first else different(state.samples(), announced["samples"]),
            witness=RUNTIME.passed(model, save_dir) if first else None,
        )  # fmt: skip

    save_dir, tag = split(absolute(place))
    request = SaveRequest(
        contribute, save_dir, tag, save_latest=save_latest, one_writer=save_latest, must_match={"step": step},
        framework_stands_in=False, failed=failed, announce=announce,
        claim=RUNTIME.owners.claim(owner), on_end=partial(_ended, save_dir),
    )  # fmt: skip
    tier = RUNTIME.memory(memory, options, save_dir)
    if tier is not None:
        in_memory = tier.save(request, exchange)
        if in_memory is not None and in_memory.agreed:
            return in_memory
    pending = RUNTIME.saver(options).save(request, exchange)
    if options.asynchronous and pending.agreed:
        return pending
    if pending.result is None or not (pending.result.complete or pending.result.skipped):
        raise SaveFailedError(f"{pending.directory}: {pending.cause()}. Earlier checkpoints are intact.")
    return pending.result


def _counter(value: Any) -> int:
    """Return a counter of the program as Python's integer: those of NumPy have another type. Others are refused later."""
    counter: int = int(value) if isinstance(value, Integral) and value is not True else value
    return counter


def _tell(own_entries: Sequence[str]) -> None:
    """Say once which state of a model no save stores."""
    if own_entries and RUNTIME.is_news(f"own state dict {' '.join(own_entries)}"):
        logger.warning(
            "unickpt: %s: only the module's own code for a state dict gives this, so it is NOT saved. Register it as a buffer, "
            "return it by get_extra_state, or pass an object with state_dict and load_state_dict as stateful=",
            some(own_entries),
        )


def _tell_of_optimizers(left_out: Sequence[str]) -> None:
    """Say once which state of optimizers no save stores."""
    if left_out and RUNTIME.is_news(f"optimizers {' '.join(left_out)}"):
        logger.warning(
            "unickpt: %s. Of an optimizer, this is NOT saved. Pass an object with state_dict and load_state_dict that has it "
            "as stateful=",
            some(left_out),
        )


def _ended(save_dir: str, pending: PendingSave) -> None:
    """Tell the log, the diagnosis and the memory tier of a save to disk. Runs in the thread that has ended it."""
    result = pending.result
    if result is None or not result.committed:
        return
    session.checkpoint_io(result.times)
    RUNTIME.saved_to_disk(save_dir, result.seconds)
    if pending.rank == 0 and result.shortfall:
        logger.error("unickpt: %s", result.shortfall)
    elif pending.rank == 0:
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s; training paused for %.2f s",
            pending.directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip


def _part(record: OptimizerRecord | None, holders: Holders, rank: int) -> OptimizerRecord | None:
    """Return the settings of the parameters that this rank is the first one to train; None if there are none."""
    if record is None or holders.others is None:
        return None

    def first_here(found: Any) -> Any:
        own = ((each, tuple(n for n in each.parameters if holders.first(trained(n)) == rank)) for each in found)
        return tuple(replace(each, parameters=names) for each, names in own if names)

    groups = first_here(record.groups)
    return OptimizerRecord(record.name, groups, first_here(record.scalars), record.stepped) if groups else None


def _writer(model: torch.nn.Module, names: Names, world: int, origin: dict[str, Any]) -> Writer:
    facts = facts_of(model)
    dialect = HUGGINGFACE if facts.family else OWN
    topology = topology_of(names, world)
    return Writer("torch", torch.__version__, __version__, torch.__version__, dialect, topology, facts.as_json(), origin)
