"""``load_training`` and ``resume_or_start`` for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_unickpt.edge import RUNTIME
from torch_unickpt.held_state.arguments import check_objects
from torch_unickpt.held_state.job_objects import JobObjects, RestoredObjects, schedulers_of
from torch_unickpt.held_state.module_states import RestoredExtraStates, own_entries
from torch_unickpt.held_state.names import Names, facts_of, names_of
from torch_unickpt.held_state.optimizers import Optimizers, RestoredOptimizers, unwrapped
from torch_unickpt.witnessing import replaying
from unickpt.api.arguments import check_kind, path_of
from unickpt.api.group import Group, exchange_of
from unickpt.api.loading import Found, HowToLoad, load
from unickpt.api.state import Key, Value
from unickpt.base.errors import ConfigError, NotACheckpointError
from unickpt.base.launcher_watch import end_with_launcher
from unickpt.base.listing import some
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.replayed import layout_of, replays
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.load.resume import Offer, Together, resume
from unickpt.checkpoint.memory.offers import MemoryResume, warn_of_unseen
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.state.filling import WEIGHT, state_for
from unickpt.checkpoint.storage.base import absolute
from unickpt.diagnosis import session
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
        strict: raise an error if the checkpoint has parameters that the model lacks, or lacks frozen ones that its job left
            out. ``False``: these keep their values.
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
        ConfigError: a parameter is on the meta device, or an argument is not what it should be.
    """
    folder = absolute(path_of(directory, order="model, optimizer, directory"))

    def nothing(offer: Offer) -> StartingPoint:
        present = f"; pass one of its checkpoints: {some(offer.present)}" if offer.present else ""
        raise NotACheckpointError(f"{folder}: no manifest.json and no 'latest' file{present}")

    how = HowToLoad(strict=strict, missing_state=missing_state, verify=verify, allow_pickle=allow_pickle, what="a model")
    job = _Job(model, optimizer, JobObjects(schedulers_of(scheduler), loader, stateful or {}, optimizer), restore_rng, dialect)
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
    place = absolute(path_of(folder, order="model, optimizer, folder"))
    first = Group.of(group).rank == 0

    def nothing(_: Offer) -> StartingPoint:
        if first:
            logger.info("unickpt: %s has no checkpoint: training starts from the beginning", place)
        return StartingPoint()

    how = HowToLoad(strict=True, missing_state=missing_state, what="a model")
    objects = JobObjects(schedulers_of(scheduler), loader, stateful or {}, optimizer)
    job = _Job(model, optimizer, objects, True, dialect, memory, resumes=True)
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
    resumes: bool = False  # and so the job goes on with the next step of the checkpoint


def _resumed(
    job: _Job, candidates: Candidates, folder: str, how: HowToLoad, nothing: Any, *, fall_back: bool,
    group: dist.ProcessGroup | None, timeout_s: float,
) -> StartingPoint:  # fmt: skip
    make_visible()
    check_kind("model", job.model, torch.nn.Module)
    if job.memory is not None:
        check_kind("memory", job.memory, MemoryOptions)
    end_with_launcher()
    shutdown.finish_all(ending=False)
    exchange, ranks = exchange_of(group, timeout_s=timeout_s, place=folder), Group.of(group)
    tier = RUNTIME.memory(job.memory, SaveOptions(), folder)
    in_memory = None if tier is None else MemoryResume(tier, folder, exchange)
    if tier is None and job.resumes and exchange.rank == 0:
        warn_of_unseen(MemoryOptions().folder, (folder,))
    offers = candidates.offer if in_memory is None else in_memory.offers(candidates.offer, lambda: -1).next

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> StartingPoint:
        report = LoadReport()
        steps: list[Any] = []

        def find(opened: Checkpoint) -> Found:
            check_objects(job.objects, method="load_state_dict")
            names = names_of(job.model)
            optimizers = Optimizers(unwrapped(job.optimizer), names)
            found = under_own_names(opened, facts_of(job.model), names.shapes, job.dialect, option="dialect=")
            stored = _stored(found, names)
            foreign = isinstance(found, TranslatedCheckpoint) and opened.manifest.writer.dialect != HUGGINGFACE
            restored = RestoredOptimizers(optimizers, found, stored, report, fresh=how.fresh) if optimizers.optimizers else None
            extra = RestoredExtraStates(names.extra, own_entries(job.model, names), report, len(ranks.ranks))
            objects = RestoredObjects(
                job.objects, found, report, extra, foreign=foreign, restore_rng=job.restore_rng, allow_pickle=how.allow_pickle,
                rank=ranks.rank, world=len(ranks.ranks),
            )  # fmt: skip
            objects.read()
            steps[:] = [restored, objects]
            tensors = {**names.parameters, **names.buffers}
            meta = [name for name, tensor in tensors.items() if tensor.is_meta]
            if meta:
                raise ConfigError(f"{some(meta)}: on the meta device. Call model.to_empty(device=...) before the load")
            kept = set() if how.strict else _left_out(found, stored, names.parameters, report)
            wanted: list[tuple[Key, Value]] = [
                ((stored[name], state_for(found, stored[name], tensor.dtype)), tensor)
                for name, tensor in tensors.items()
                if name not in kept
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
    if job.resumes:
        session.stands_at(start.step)
    if ranks.rank == 0 and start.path != folder:
        RUNTIME.folders(job.model).loaded(folder)
    exchange.leave()
    request = replays(folder)
    if request is not None and start.path is not None:
        replaying.begin(RUNTIME, request, job.model, job.optimizer, layout_of(start.path), group)
    return start


def _left_out(
    found: Checkpoint, stored: Mapping[str, str], parameters: Mapping[str, torch.Tensor], report: LoadReport
) -> set[str]:
    """Return the frozen parameters that the saving job left out, as those under adapters. They keep their values."""
    excluded = frozenset(found.manifest.excluded)
    kept = {name for name, each in parameters.items() if stored[name] in excluded and not each.requires_grad}
    for name in sorted(kept):
        report.add(name, WEIGHT, "left out", "frozen, and left out when it was saved")
    return kept


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
