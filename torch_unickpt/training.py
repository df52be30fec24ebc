"""``save_training``, ``load_training`` and ``resume_or_start`` for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_unickpt import describe
from torch_unickpt.edge import RUNTIME
from torch_unickpt.job_objects import JobObjects, RestoredObjects, schedulers_of
from torch_unickpt.names import Names, names_of
from torch_unickpt.optimizers import Optimizers, RestoredOptimizers, unwrapped
from unickpt import __version__
from unickpt.api.dtensors import is_dtensor
from unickpt.api.group import Group, exchange_of
from unickpt.api.holders import Holders, agreed_holders, mesh_digests
from unickpt.api.loading import Found, HowToLoad, load
from unickpt.api.state import Key, Value
from unickpt.base.errors import ConfigError, NotACheckpointError, SaveFailedError
from unickpt.base.launcher_watch import end_with_launcher
from unickpt.base.listing import some
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.format.manifest import OptimizerRecord, Writer
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.load.resume import Offer, Together, resume
from unickpt.checkpoint.memory.offers import MemoryResume
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.state.filling import state_for
from unickpt.checkpoint.storage.base import absolute, split
from unickpt.diagnosis import session
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.named_here import under_own_names
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, TranslatedCheckpoint


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a job begins.

    Attributes:
        path: the checkpoint that was loaded; None if the job starts without one.
        step: optimizer steps done; 0 without a checkpoint.
        samples: samples of these steps over all ranks; 0 if the saving job did not count them.
        client_state: as it was saved.
        report: outcome for every tensor and object.
    """

    path: str | None = None
    step: int = 0
    samples: int = 0
    client_state: dict[str, Any] = field(default_factory=dict)
    report: LoadReport = field(default_factory=LoadReport, repr=False)

    @property
    def resumed(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self.path is not None


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
        client_state: further values ([types](../format.md#8-objects)). Rank 0's are stored.
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
        SaveFailedError: no checkpoint was written. It is raised on every rank and names rank and cause. Earlier checkpoints
            are intact.
        CoordinationError: a rank did not make the call within ``timeout_s``.
    """
    make_visible()
    options = options or SaveOptions()
    exchange, ranks = exchange_of(group, timeout_s=timeout_s), Group.of(group)
    objects = JobObjects(schedulers_of(scheduler), loader, stateful or {})
    failed: BaseException | None = None
    names, optimizers, items, keys, meshes = None, None, [], None, None
    try:
        names = names_of(model)
        optimizers = Optimizers(unwrapped(optimizer), names)
        items = describe.items_of(names, optimizers, ranks)
        keys = [*(item.text for item in items if item.plain), *(_trained(each.name) for each in optimizers.parameters)]
        meshes = mesh_digests((item.key, item.value) for item in items if is_dtensor(item.value))
    except Exception as err:  # the other ranks learn it in the save
        failed = err
    holders = agreed_holders(exchange, keys, meshes)
    owner = RUNTIME.owner(model)
    assert RUNTIME.owners is not None
    origin = asdict(RUNTIME.owners.origin(owner))

    def contribute(_: Message) -> Contribution:
        assert names is not None
        assert optimizers is not None
        silent = next(filter(None, map(silent_steps, optimizers.optimizers)), "")
        unsteady = silent if optimizers.optimizers else "the save has no optimizer"
        held = describe.description(items, holders, ranks, steady=not unsteady)
        record = optimizers.record()
        first = ranks.rank == 0
        return Contribution(
            held.shards(), step, _writer(model, names, len(ranks.ranks), origin), tensors=held.tensors,
            optimizer=record if first else None, optimizer_part=None if first else _part(record, holders, ranks.rank),
            aliases=names.aliases, objects=objects.captured(step, samples, client_state or {}) if first else {},
            rank_objects=objects.of_rank(), unsteady=unsteady,
        )  # fmt: skip

    save_dir, tag = split(absolute(os.fspath(directory)))
    request = SaveRequest(
        contribute, save_dir, tag, save_latest=save_latest, one_writer=save_latest, must_match={"step": step},
        framework_stands_in=False, failed=failed, claim=RUNTIME.owners.claim(owner), on_end=partial(_ended, save_dir),
    )  # fmt: skip
    tier = RUNTIME.memory(memory, options)
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


def _trained(name: str) -> str:
    return f"trained {name}"


def _part(record: OptimizerRecord | None, holders: Holders, rank: int) -> OptimizerRecord | None:
    """Return the settings of the parameters that this rank is the first one to train; None if there are none."""
    if record is None or holders.others is None:
        return None

    def first_here(found: Any) -> Any:
        own = ((each, tuple(n for n in each.parameters if holders.first(_trained(n)) == rank)) for each in found)
        return tuple(replace(each, parameters=names) for each, names in own if names)

    groups = first_here(record.groups)
    return OptimizerRecord(record.name, groups, first_here(record.scalars), record.stepped) if groups else None


def _writer(model: torch.nn.Module, names: Names, world: int, origin: dict[str, Any]) -> Writer:
    facts = _facts(model)
    mesh = next((each.device_mesh for each in map(_as_any, names.parameters.values()) if is_dtensor(each)), None)
    topology: dict[str, Any] = {"world_size": world}
    if mesh is not None:
        dims = mesh.mesh_dim_names or tuple(f"dim{at}" for at in range(mesh.ndim))
        topology["mesh"] = dict(zip(dims, mesh.shape, strict=True))
    dialect = HUGGINGFACE if facts.family else "torch"
    return Writer("torch", torch.__version__, __version__, torch.__version__, dialect, topology, facts.as_json(), origin)


def _as_any(value: Any) -> Any:
    return value


def _facts(model: Any) -> Model:
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), torch.nn.Module):
        model = inner
    return Model.of_module(model)


def load_training(
    model: torch.nn.Module,
    optimizer: Any,
    directory: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    loader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    fall_back: bool = True,
    strict: bool = True,
    missing_state: Literal["error", "fresh"] = "error",
    restore_rng: bool = True,
    dialect: str = "",
    verify: str = "always",
    allow_pickle: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> StartingPoint:
    """Load a checkpoint of any framework and layout into a model, its optimizer and the objects around. Every rank calls it.

    Each rank reads only what it holds. After the load the optimizer has exactly the states of the checkpoint.

    Example:
        Continue a run of DeepSpeed, and see what became of every state::

            start = unickpt.load_training(model, optimizer, "deepspeed_out", scheduler=scheduler)
            print(start.step, start.samples, *start.report.lines(), sep="\n")

    Args:
        model: as for ``save_training``. Its parameters have memory: after a start on the meta device, call
            ``model.to_empty(device=...)`` before.
        optimizer: as for ``save_training``. None: only the weights are loaded.
        directory: a checkpoint, or a folder of checkpoints, of which the one that ``latest`` names is loaded.
        scheduler: as for ``save_training``. Of another framework's checkpoint it takes the position.
        loader: as for ``save_training``. With another number of ranks it needs ``reshard``.
        stateful: as for ``save_training``.
        fall_back: load the newest complete older checkpoint of the folder if one is damaged.
        strict: raise an error if the checkpoint has parameters that the model lacks.
        missing_state: what to do about states of the optimizer that the checkpoint lacks. ``error``: nothing is loaded.
            ``fresh``: they start anew.
        restore_rng: restore the generators of Python, NumPy and torch.
        dialect: family of the model, or path of a dialect file, if a checkpoint of another framework does not tell.
        verify: as for ``unickpt.load_checkpoint``.
        allow_pickle: as for ``unickpt.load_checkpoint``.
        group: as for ``save_training``.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        Step, samples, what was saved as ``client_state``, and the report.

    Raises:
        NotACheckpointError: the directory holds no checkpoint.
        MismatchError: tensors or states are missing, or shapes differ. Raised before data is read.
        CorruptCheckpointError, FormatError: the checkpoint is damaged and no other one can be used.
        ConfigError: a parameter is on the meta device.
    """
    folder = absolute(os.fspath(directory))

    def nothing(offer: Offer) -> StartingPoint:
        present = f"; pass one of its checkpoints: {some(offer.present)}" if offer.present else ""
        raise NotACheckpointError(f"{folder}: no manifest.json and no 'latest' file{present}")

    how = HowToLoad(strict=strict, fresh=missing_state == "fresh", verify=verify, allow_pickle=allow_pickle, what="a model")
    job = _Job(model, optimizer, JobObjects(schedulers_of(scheduler), loader, stateful or {}), restore_rng, dialect)
    return _resumed(job, Candidates(folder), folder, how, nothing, fall_back=fall_back, group=group, timeout_s=timeout_s)


def resume_or_start(
    model: torch.nn.Module,
    optimizer: Any,
    folder: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    loader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    missing_state: Literal["error", "fresh"] = "error",
    dialect: str = "",
    memory: MemoryOptions | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> StartingPoint:
    """Load the newest complete checkpoint of a folder, or start without one if there is none. Every rank calls it.

    It is the one that the file ``latest`` names. If that one is damaged, or if there is no such file, it is the newest one that
    is complete. A save that did not finish is no checkpoint.

    Args:
        model, optimizer, scheduler, loader, stateful, missing_state, dialect, group, timeout_s: as for ``load_training``.
        folder: the folder of the checkpoints. A path or a URL. It need not exist.
        memory: as for ``save_training``. A newer checkpoint in the memory of the hosts is loaded first.

    Returns:
        The position from which training goes on.

    Raises:
        UnickptError: the folder has checkpoints, but none of them can be loaded, or the newest one does not fit. Training from
            the beginning would replace them. Raised on every rank.
    """
    place = absolute(os.fspath(folder))
    first = Group.of(group).rank == 0

    def nothing(_: Offer) -> StartingPoint:
        if first:
            logger.info("unickpt: %s has no checkpoint: training starts from the beginning", place)
        return StartingPoint()

    how = HowToLoad(strict=True, fresh=missing_state == "fresh", what="a model")
    objects = JobObjects(schedulers_of(scheduler), loader, stateful or {})
    job = _Job(model, optimizer, objects, True, dialect, memory)
    return _resumed(job, Candidates(place, newest=True), place, how, nothing, fall_back=True, group=group, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class _Job:
    """What a load fills."""

    model: torch.nn.Module
    optimizer: Any
    objects: JobObjects
    restore_rng: bool
    dialect: str
    memory: MemoryOptions | None = None


def _resumed(
    job: _Job, candidates: Candidates, folder: str, how: HowToLoad, nothing: Any, *, fall_back: bool,
    group: dist.ProcessGroup | None, timeout_s: float,
) -> StartingPoint:  # fmt: skip
    make_visible()
    end_with_launcher()
    shutdown.finish_all(ending=False)
    exchange, ranks = exchange_of(group, timeout_s=timeout_s), Group.of(group)
    tier = RUNTIME.memory(job.memory, SaveOptions())
    in_memory = None if tier is None else MemoryResume(tier, folder, exchange)
    offers = candidates.offer if in_memory is None else in_memory.offers(candidates.offer, lambda: -1).next

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> StartingPoint:
        report = LoadReport()
        steps: list[Any] = []

        def find(opened: Checkpoint) -> Found:
            names = names_of(job.model)
            optimizers = Optimizers(unwrapped(job.optimizer), names)
            found = under_own_names(opened, _facts(job.model), names.shapes, job.dialect, option="dialect=")
            stored = _stored(found, names)
            foreign = isinstance(found, TranslatedCheckpoint) and opened.manifest.writer.dialect != HUGGINGFACE
            restored = RestoredOptimizers(optimizers, found, stored, report, fresh=how.fresh) if optimizers.optimizers else None
            objects = RestoredObjects(
                job.objects, found, report, foreign=foreign, restore_rng=job.restore_rng, allow_pickle=how.allow_pickle,
                rank=ranks.rank, world=len(ranks.ranks),
            )  # fmt: skip
            objects.read()
            steps[:] = [restored, objects]
            tensors = {**names.parameters, **names.buffers}
            meta = [name for name, tensor in tensors.items() if tensor.is_meta]
            if meta:
                raise ConfigError(f"{some(meta)}: on the meta device. Call model.to_empty(device=...) before the load")
            wanted: list[tuple[Key, Value]] = [
                ((stored[name], state_for(found, stored[name], tensor.dtype)), tensor) for name, tensor in tensors.items()
            ]
            return Found(found, [*wanted, *([] if restored is None else restored.requests(ranks))], names.aliases)

        with torch.no_grad():
            if in_memory is not None and offer.checked:
                Together(exchange, offer.directory).step("check", partial(in_memory.check, offer))
            source = None if in_memory is None else partial(in_memory.open, offer)
            loaded = load(exchange, offer.directory, find, ranks, how, skipped, report=report, source=source)
            Together(exchange, offer.directory).step("apply", lambda: [step.apply() for step in steps if step is not None])
        owner = RUNTIME.owner(job.model)
        assert RUNTIME.owners is not None
        RUNTIME.owners.adopt(owner, Origin.of(loaded.checkpoint.manifest))
        if in_memory is not None:
            in_memory.loaded(offer, loaded.step)
        session.checkpoint_io(report.io_times(loaded.step))
        objects = steps[1]
        if ranks.rank == 0:
            report.log()
        return StartingPoint(offer.directory, loaded.step, objects.samples(), objects.client_state(), report)

    start: StartingPoint = resume(exchange, offers, attempt, nothing, where=folder, fall_back=fall_back)
    exchange.leave()
    return start


def _stored(checkpoint: Checkpoint, names: Names) -> dict[str, str]:
    """Return the name in the checkpoint of each parameter and buffer: its own, or that of a tensor that it is tied to."""
    others: dict[str, list[str]] = {}
    for alias, name in names.aliases.items():
        others.setdefault(name, []).append(alias)
    found = {}
    for name in (*names.parameters, *names.buffers):
        spellings = [name, *others.get(name, ())]
        candidates = [*spellings, *(checkpoint.manifest.aliases.get(each, each) for each in spellings)]
        found[name] = next((each for each in candidates if checkpoint.serving(each, "weight") is not None), name)
    return found
