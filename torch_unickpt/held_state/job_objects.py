"""Schedulers, loaders, generators and other stateful objects of a job, in a checkpoint and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_unickpt.held_state.module_states import EXTRA_STATE, RestoredExtraStates
from torch_unickpt.held_state.optimizers import chains
from unickpt.api.dtensors import is_dtensor
from unickpt.base.errors import ConfigError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.object_encoder import MAX_DEPTH
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state import client_states, optimizer_entries
from unickpt.checkpoint.state.client_states import CLIENT
from unickpt.checkpoint.state.optimizer_entries import OPTIMIZERS
from unickpt.transform.convert import training_progress

ENGINE, SCHEDULER, MORE_SCHEDULERS, STATEFUL = "engine", "lr_scheduler", "lr_schedulers", "stateful"
RNG, LOADER = "rng", "data_loader"  # of each rank
_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True, slots=True)
class JobObjects:
    """Objects of a job that have a state beside model and optimizer.

    Attributes:
        schedulers: learning-rate schedulers.
        loader: data loader of this rank, or None.
        stateful: further objects with ``state_dict`` and ``load_state_dict``, by name.
        optimizer: as for ``optimizers.chains``. Of its state dict only what is beside states and groups belongs here.
    """

    schedulers: Sequence[Any] = ()
    loader: Any = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = None

    def captured(
        self, step: int, samples: int | None, client_state: Mapping[str, Any], extra_states: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state of the whole job.

        ``engine``, ``lr_scheduler`` and ``module_extra_state`` have the form that the adapter for DeepSpeed stores, so that
        every framework finds the counters, the position of the schedule, and the states of modules.

        Raises:
            ConfigError: a value is a DTensor of which this rank has a part.
        """
        states = [{"class": type(each).__name__, "state": each.state_dict()} for each in map(_inner, self.schedulers)]
        found: dict[str, Any] = {
            ENGINE: {"global_steps": step, "global_samples": samples or 0, "skipped_steps": 0},
            SCHEDULER: states[0] if states else None,
            **({MORE_SCHEDULERS: states[1:]} if len(states) > 1 else {}),
            STATEFUL: {name: each.state_dict() for name, each in self.stateful.items()},
            **({EXTRA_STATE: dict(extra_states)} if extra_states else {}),
            CLIENT: dict(client_state),
        }
        parts = list(_parts(found, "", set()))
        if parts:
            raise ConfigError(
                f"{some(parts)}: divided among the ranks (DTensor), but only rank 0's state of an object is stored. "
                'Save its module with the model, as torch.nn.ModuleDict({"model": model, "ema": ema}), or give whole tensors '
                "(full_tensor() on all ranks)"
            )
        return found

    def of_rank(self) -> tuple[dict[str, Any], list[str]]:
        """Return the state of this rank alone, and what is not stored of its optimizers, each with the reason."""
        added = optimizer_entries.captured(chains(self.optimizer))
        return {
            RNG: rng.capture(),
            **({} if self.loader is None else {LOADER: self.loader.state_dict()}),
            **({OPTIMIZERS: added.stored} if added.stored else {}),
        }, added.left_out


def schedulers_of(given: Any) -> list[Any]:
    """Return the schedulers in an argument: one, several or None."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _inner(scheduler: Any) -> Any:
    """Return the scheduler that a wrapper such as Accelerate's drives; the wrapper itself if it has a state of its own."""
    inner: Any = getattr(scheduler, "scheduler", None)
    if not callable(getattr(inner, "state_dict", None)):
        return scheduler
    own = getattr(scheduler, "state_dict", None)
    return inner if not callable(own) or set(own()) == set(inner.state_dict()) else scheduler


def _parts(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    """Return the places of DTensors of which no rank has the whole. ``seen``: containers on the way, by ``id``."""
    if is_dtensor(value):
        if value.device_mesh.size() > 1 and not all(each.is_replicate() for each in value.placements):
            yield path
        return
    listed = isinstance(value, (list, tuple))
    if not (listed or isinstance(value, Mapping)) or id(value) in seen or path.count(".") + path.count("[") > MAX_DEPTH:
        return
    seen.add(id(value))
    for key, each in enumerate(value) if listed else value.items():
        if type(each) not in _PLAIN and isinstance(each, (Mapping, list, tuple, torch.Tensor)):
            yield from _parts(each, f"{path}[{key}]" if listed else f"{path}.{key}".lstrip("."), seen)


class RestoredObjects:
    """The objects of one load. ``read`` first, ``apply`` after all ranks have read the tensors.

    Args:
        objects: of this job.
        checkpoint: with the objects of the saving job.
        foreign: the checkpoint was translated from another framework's names.
        report: gets an entry for each object.
        extra: extra states of modules.
        rank, world: this rank, and the number of ranks of this job.
    """

    def __init__(
        self, objects: JobObjects, checkpoint: Checkpoint, report: LoadReport, extra: RestoredExtraStates, *, foreign: bool,
        restore_rng: bool, allow_pickle: bool, rank: int, world: int,
    ) -> None:  # fmt: skip
        self.own, self.checkpoint, self.report, self.foreign = objects, checkpoint, report, foreign
        self.restore_rng, self.allow_pickle, self.rank, self.world = restore_rng, allow_pickle, rank, world
        self._extra = extra
        self._saved: dict[str, Any] = {}
        self._ranks: dict[int, dict[str, Any]] = {}

    @property
    def before(self) -> int:
        """Number of ranks of the job that saved."""
        return int(self.checkpoint.manifest.writer.topology.get("world_size") or 1)

    def read(self) -> None:
        """Read the state of the job, of this rank, and of those that it may need.

        Raises:
            MismatchError: a loader cannot be divided among another number of ranks.
        """
        self._saved = dict(self.checkpoint.objects(allow_pickle=self.allow_pickle).value)
        self._extra.read(self.checkpoint, allow_pickle=self.allow_pickle)
        wanted = {0, min(1, self.before - 1), *({self.rank} if self.rank < self.before else ())}
        if self.own.loader is not None and self.before != self.world:
            wanted = set(range(self.before))
        for rank in wanted:
            self._ranks[rank] = dict(self.checkpoint.rank_objects(rank, allow_pickle=self.allow_pickle).value)
        self._check_loader()

    def _check_loader(self) -> None:
        """Raise a MismatchError if the states of the saved loaders cannot be divided among the ranks of this job."""
        loader, saved = self.own.loader, [rank for rank, objects in self._ranks.items() if objects.get(LOADER) is not None]
        if loader is None or self.before == self.world or not saved:
            return
        if len(saved) < self.before:  # such as rank 0 alone, which reads for all
            raise MismatchError(
                f"{self.checkpoint.storage}: of {self.before} ranks, only {some(sorted(saved))} saved the state of "
                f"a data loader, so these states cannot be divided among the {self.world} of this job. Pass loader=None, and "
                "set the position by hand"
            )
        if not hasattr(loader, "reshard"):
            raise MismatchError(
                f"{self.checkpoint.storage}: {self.before} ranks saved the states of their data loaders, this job has "
                f"{self.world}, and {type(loader).__name__} has no method reshard (unickpt.ReshardableLoader). Pass "
                "loader=None, and set the position by hand"
            )

    def apply(self) -> None:
        """Set the states."""
        self._extra.apply()
        self._set_schedulers()
        for name, target in self.own.stateful.items():
            found = (self._saved.get(STATEFUL) or {}).get(name)
            if found is None:
                self._note(name, "left out", "none was saved: it keeps its own state")
            else:
                target.load_state_dict(found)
                self._note(name, "restored")
        self._set_optimizers()
        self._set_loader()
        self._set_generators()
        changed = self._client_state()[1]
        if changed:
            self._note(CLIENT, "set", changed)

    def client_state(self) -> dict[str, Any]:
        """Return what the caller of the save passed: on the same number of ranks that of this rank, if it had others."""
        return self._client_state()[0]

    def _client_state(self) -> tuple[dict[str, Any], str]:
        return client_states.of_rank(self._saved, self._ranks, self.rank, self.before, self.world)

    def samples(self) -> int:
        """Return the number of samples of the steps that were done; 0 if the saving job did not count them."""
        return training_progress.of_job(self.checkpoint.manifest.step, self._saved).samples or 0

    def _note(self, name: str, outcome: Any, reason: str = "") -> None:
        self.report.add(name, "object", outcome, reason)

    def _set_schedulers(self) -> None:
        states = [self._saved.get(SCHEDULER), *(self._saved.get(MORE_SCHEDULERS) or ())]
        progress = training_progress.of_schedule(self.checkpoint.manifest.step, self._saved)
        for at, target in enumerate(map(_inner, self.own.schedulers)):
            name = SCHEDULER if not at else f"{SCHEDULER}[{at}]"
            saved, kind = states[at] if at < len(states) else None, type(target).__name__
            inside = getattr(target, "scheduler", None)
            if isinstance(saved, Mapping) and saved.get("class") in (kind, None):
                target.load_state_dict(saved["state"])
                self._note(name, "restored")
            elif isinstance(saved, Mapping) and inside is not None and saved.get("class") == type(inside).__name__:
                inside.load_state_dict(saved["state"])  # an earlier release saved no more of it
                self._note(name, "restored", f"the {saved['class']} in it; {kind} itself keeps its own state")
            elif training_progress.move(target, progress):
                self._note(name, "set", f"{kind} of this job is set to step {progress.steps:,}")
            else:
                stored = saved["class"] if isinstance(saved, Mapping) else "none"
                self._note(name, "left out", f"saved from {stored}, this job has {kind}, which cannot be moved to a step")

    def _set_optimizers(self) -> None:
        found, reason = optimizer_entries.of_rank(self._ranks, self.rank, self.before, self.world)
        optimizer_entries.restore(chains(self.own.optimizer), found, self.report, reason)

    def _set_loader(self) -> None:
        loader = self.own.loader
        if loader is None:
            return
        same = self.before == self.world  # then other ranks need not have one
        states = [self._ranks[rank].get(LOADER) for rank in ([self.rank] if same else sorted(self._ranks))]
        if None in states:
            self._note(LOADER, "left out", "none was saved: it keeps its own state")
        elif same:
            loader.load_state_dict(states[0])
            self._note(LOADER, "restored")
        else:
            loader.load_state_dict(loader.reshard(states, self.world)[self.rank])
            self._note(LOADER, "re-seeded", f"the samples of {self.before} ranks are dealt to {self.world}")

    def _set_generators(self) -> None:
        first: Any = self._ranks.get(0, {}).get(RNG)
        own: Any = self._ranks.get(self.rank, {}).get(RNG)
        if not self.restore_rng:
            self._note(RNG, "left out", "restore_rng is false")
        elif self.foreign or not rng.is_state(first):
            framework = self.checkpoint.manifest.writer.framework
            self._note(RNG, "left out", f"generators of {framework} have no counterpart: this job's own keep their state")
        elif own is not None:
            missing = rng.restore(own)
            if missing:
                self._note(RNG, "left out", f"this process has no {', '.join(missing)} generator")
            elif self.before == self.world:
                self._note(RNG, "restored")
            else:
                self._changed(rng.kept(self.before, self.world))
        else:
            second = self._ranks.get(1, {}).get(RNG)
            if second is not None and rng.equal(first, second):
                rng.restore(first)
                self._changed("all ranks shared one state, and still share it")
            else:
                rng.reseed(first, self.rank)
                self._changed("this rank is new, and is seeded from rank 0")

    def _changed(self, how: str) -> None:
        self._note(RNG, "re-seeded", rng.change(rng.counted(self.before), str(self.world), how))
