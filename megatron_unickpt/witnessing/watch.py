"""``witness`` for programs that use megatron-core as a library, and for Megatron's training scripts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework import internals
from megatron_unickpt.framework.optimizer_internals import steppers, weights_follow_late
from megatron_unickpt.framework.versions import FRAMEWORK, version
from megatron_unickpt.runtime import Runtime
from megatron_unickpt.witnessing.held import held_by, named_parameters, ranges_alone, unwrapped
from megatron_unickpt.witnessing.step_hooks import HOOKS
from megatron_unickpt.witnessing.taps import ChunkTaps, tap_of, unsuited
from unickpt.api.acting import Recorded
from unickpt.api.witness import Witness
from unickpt.base import hooks
from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger, make_visible
from unickpt.base.round_folder import folder_of_round
from unickpt.base.step_replay import asked
from unickpt.checkpoint.witness_faults import FaultFolders
from unickpt.training.witness.agreeing import Ranks, circles, ranks_of
from unickpt.training.witness.buddies import Buddies
from unickpt.training.witness.causes import Causes
from unickpt.training.witness.counting import Counters, all_finite
from unickpt.training.witness.held import Stepped
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.recomputing import Recomputed, Selves
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.replicas import Replicas, replicas_of
from unickpt.training.witness.settings import BUDDY, NONFINITE, OUTLIER, SELF, UPDATE, Settings, settings_of
from unickpt.training.witness.updating import Range, StepTap
from unickpt.training.witness.updating import unsuited as steps_unsuited
from unickpt.training.witness.vote import Kind
from unickpt.training.witness.watching import Watched, Watching, seeing


class OptimizerWitness:
    """The witness of a model and its optimizer.

    Attributes:
        watching: what it does.
        recorded: what checkpoints say of it.
    """

    def __init__(self, watching: Watching, watched: Watched, chunks: Sequence[torch.nn.Module]) -> None:
        self.watching, self.recorded = watching, Recorded(watching, FaultFolders())
        self._watched, self._chunks = watched, chunks

    def watches(self, parameter: Any) -> bool:
        """Return whether a parameter is one of the model."""
        return any(each is parameter for chunk in self._chunks for each in chunk.parameters())

    def before(self) -> None:
        """A step begins."""
        done = internals.iterations_done()
        if done is not None:
            self._watched.step = done
        self.watching.before(self._watched)

    def after(self, result: Any) -> None:
        """A step has ended. ``result``: what it returns, first of all whether the loss scaler did not leave it out."""
        self.watching.after(self._watched, applied=not isinstance(result, tuple) or bool(result[0]))


def witness(model: Any, optimizer: Any, options: Mapping[str, Any] | None, *, step: int = 0) -> Witness:
    """Watch a training for numbers that are silently wrong. Every rank calls it, after the model is wrapped and loaded.

    Megatron's training scripts call it for ``--unickpt-witness-every``.

    Args:
        model: megatron-core module, wrapped in Megatron's DDP, or the list of a rank's model chunks.
        optimizer: optimizer of megatron-core, chained or not.
        options: ``{"every": 50, "checks": ["rest", "replicas", "nonfinite"]}``, or a part of it. None: nothing is watched.
        step: optimizer steps done.

    Returns:
        What is found. It is also in the log.

    Raises:
        ConfigError: an option is wrong.
    """
    settings = settings_of(options)
    if settings is None:
        return Witness(None)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    return begin(RUNTIME, chunks, optimizer, settings, step)


def begin(
    runtime: Runtime, chunks: Sequence[torch.nn.Module], optimizer: Any, settings: Settings, step: int = 0,
    folders: Sequence[str] = (),
) -> Witness:  # fmt: skip
    """Watch a model. If that cannot begin, a warning says why, and training goes on. ``folders``: of its checkpoints."""
    make_visible()
    if asked() is not None:  # a job that repeats a step records all of it
        return Witness(None)
    device = next((each.device for chunk in chunks for each in chunk.parameters()), torch.device("cpu"))
    job = Ranks.of(None, device)
    try:
        own = _made(chunks, optimizer, settings, job, step)
    except Exception as err:  # raised on all ranks
        logger.warning("unickpt: witness: it cannot watch this model, and training goes on: %s: %s", type(err).__name__, err)
        return Witness(None)
    if not hooks.install(HOOKS, framework=FRAMEWORK, version=version(), lost="no witness"):
        own.watching.close()
        return Witness(None)
    runtime.witnesses[optimizer] = own
    if job.leads:
        _note_folders(runtime, own, folders)
    if settings.act:
        own.recorded.may_act()
    known = weakref.ref(optimizer)
    own.watching.hooks.append(lambda: _end(runtime, known()))
    return Witness(own.watching)


def _note_folders(runtime: Runtime, own: OptimizerWitness, folders: Sequence[str]) -> None:
    for folder in folders:
        own.recorded.folders.note(folder)
    for known, folder in runtime.resumed:
        if (parameter := known()) is not None and own.watches(parameter):
            own.recorded.folders.loaded(folder)


def _end(runtime: Runtime, optimizer: Any) -> None:
    if optimizer is not None:
        runtime.witnesses.pop(optimizer, None)


def _made(chunks: Sequence[torch.nn.Module], optimizer: Any, settings: Settings, job: Ranks, step: int) -> OptimizerWitness:
    groups = job.together(lambda: {expert: internals.data_parallel_group(expert=expert) for expert in (False, True)})
    of_data, of_experts = (Ranks.of(groups[expert], job.device) for expert in (False, True))
    copies = {False: tuple(sorted(of_data.ranks)), True: tuple(sorted(of_experts.ranks))}
    known = weakref.ref(optimizer)  # the witness ends with it

    def held() -> list[Stepped]:
        return held_by(chunks, known(), copies)

    stepped = job.together(held)
    different = [of_data] if copies[True] == copies[False] else [of_data, of_experts]
    compared = job.together(lambda: circles([ranks for ranks in different if len(ranks.ranks) > 1], stepped))
    replicas = replicas_of(job, *job.together(lambda: (internals.replica_ranks(), _within(job))))
    watched = Watched(held, compared, partial(_finite, chunks), step)
    checks = seeing(settings.checks, [watched], job)
    why = next(filter(None, job.gather_objects(unsuited(chunks))), "")
    if replicas is None:
        why = why or "it needs two replicas of the model, also of the experts"
    updates = _updates(chunks, optimizer, copies, job) if UPDATE in checks else None
    if updates is None:
        checks.discard(UPDATE)
    return job.together(lambda: _beginning(chunks, optimizer, settings, checks, job, watched, replicas, why, updates))


def _beginning(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    settings: Settings,
    checks: set[str],
    job: Ranks,
    watched: Watched,
    replicas: Replicas | None,
    why: str,
    updates: Buddies[StepTap] | None,
) -> OptimizerWitness:
    counters = _counters(chunks) if {NONFINITE, OUTLIER} & checks else []
    taps = _taps(chunks) if not why and {BUDDY, NONFINITE, OUTLIER} & checks else []
    buddies = Buddies(ChunkTaps(taps), job, replicas=replicas) if BUDDY in checks and taps else None
    if BUDDY in checks and why:
        checks.discard(BUDDY)
        _tell_none(BUDDY, why, job)
    causes = None
    if len(counters) == len(taps) == 1:
        causes = Causes(Recalled(taps[0]), counters[0], job, partial(_folders, settings.batches), replicas)
    selves = Selves(Recomputed([unwrapped(each) for each in chunks]), job, set(_within(job))) if SELF in checks else None
    late = weights_follow_late(optimizer)
    watching = Watching(settings.every, checks, [watched], job, counters, buddies, causes, selves, updates, late)
    return OptimizerWitness(watching, watched, chunks)


def _updates(
    chunks: Sequence[torch.nn.Module], optimizer: Any, copies: Mapping[bool, tuple[int, ...]], job: Ranks
) -> Buddies[StepTap] | None:
    """Return what repeats steps on tensors without copies; None, with a warning, if nothing can. Every rank calls it."""
    known = weakref.ref(optimizer)  # the witness ends with it

    def ranges() -> list[Range]:
        return ranges_alone(chunks, known(), copies)

    inner = steppers(optimizer)
    why = steps_unsuited(inner)
    own, number = job.together(lambda: (",".join(sorted({type(each).__name__ for each in inner})), len(ranges())))
    every = job.gather_objects((why, own, number))
    why = next(filter(None, (each[0] for each in every)), "")
    if len(every) == 1:
        why = why or "it needs several ranks"
    elif not all(each[2] for each in every):
        why = why or "a rank has nothing without copies on other ranks. Copies are compared by replicas"
    elif len({each[1] for each in every}) > 1:
        why = why or "ranks have optimizers of several classes"
    if why:
        _tell_none(UPDATE, why, job)
        return None
    return Buddies(StepTap(inner, ranges, job.rank), job, Kind.SDC_UPDATE)


def _tell_none(check: str, why: str, job: Ranks) -> None:
    if job.leads:
        logger.warning("unickpt: witness: there is no check %s: %s", check, why)


def _within(job: Ranks) -> list[int]:
    """Return the global ranks that compute parts of the same layers as this one."""
    return sorted({job.rank, *ranks_of(internals.groups_within_layers())})


def _taps(chunks: Sequence[torch.nn.Module]) -> list[Tap]:
    return [tap_of(chunk, unwrapped(chunk), dict(unwrapped(chunk).named_parameters())) for chunk in chunks]


def _folders(named: str) -> list[str]:
    """Return where micro-batches with values that are not finite are written, the best first."""
    of_round = folder_of_round()
    return [each for each in (named, "" if of_round is None else str(of_round)) if each]


def _counters(chunks: Sequence[torch.nn.Module]) -> list[Counters]:
    try:
        return [Counters(chunk, unwrapped(chunk)) for chunk in chunks]
    except ConfigError as err:
        logger.warning("unickpt: witness: %s", err)
        return []


def _finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether the gradients are finite that the next step uses: those in Megatron's buffers, if there are buffers."""
    return all_finite(getattr(each, "main_grad", each.grad) for each in named_parameters(chunks).values())
