"""The witness of an engine, which the option ``witness`` begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework import internals, partitions, settling
from ds_unickpt.framework.versions import version
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import KnownNames
from ds_unickpt.loops import trainer_folders
from ds_unickpt.runtime import EngineRuntime
from ds_unickpt.witnessing.held import Copies, held_by
from ds_unickpt.witnessing.step_hooks import HOOKS
from unickpt.api.acting import Recorded
from unickpt.api.witness import Witness
from unickpt.base import hooks
from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger
from unickpt.base.options.job import WitnessOptions
from unickpt.base.round_folder import folder_of_round
from unickpt.base.step_replay import asked
from unickpt.checkpoint.witness_faults import FaultFolders
from unickpt.training.witness.agreeing import Ranks, circles, ranks_of
from unickpt.training.witness.buddies import Buddies
from unickpt.training.witness.causes import Causes
from unickpt.training.witness.counting import Counters
from unickpt.training.witness.held import Stepped
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.recomputing import Recomputed, Selves
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.settings import BUDDY, NONFINITE, OUTLIER, SELF, UPDATE, Settings, settings_from
from unickpt.training.witness.updating import Range, StepTap, unsuited
from unickpt.training.witness.vote import Kind
from unickpt.training.witness.watching import Watched, Watching, seeing

Held = Callable[[], list[Stepped]]


class EngineWitness:
    """The witness of an engine. ``begin`` makes it on all ranks.

    Attributes:
        watching: what it does.
        recorded: what checkpoints say of it.
    """

    def __init__(self, watching: Watching, watched: Watched) -> None:
        self.watching, self.recorded = watching, Recorded(watching, FaultFolders(), _of_run)
        self._watched = watched
        self._skipped = self._scale = 0.0

    def before(self, engine: Any) -> None:
        """A step begins."""
        self._watched.step = int(engine.global_steps)
        self._skipped, self._scale = int(engine.skipped_steps), _scale(engine)
        self.watching.before(self._watched)

    def after(self, engine: Any) -> None:
        """A step has ended."""
        scales = internals.loss_scaler(engine) is not None
        left_out = scales and int(engine.skipped_steps) > self._skipped
        applied = not left_out and _scale(engine) >= self._scale
        self.watching.after(self._watched, applied=applied)

    def forget(self) -> None:
        """A load begins."""
        self.watching.forget()


def _of_run(folder: str) -> list[str]:
    """Return the folders of Trainer's run, which has one for each checkpoint, by one of them. Any other folder is alone."""
    if not trainer_folders.is_one(folder):
        return [folder]
    run = trainer_folders.run_of(folder)
    return [run, *trainer_folders.folders(run)]


def _scale(engine: Any) -> float:
    """Return the scale of torch's ``GradScaler``, which becomes smaller when it leaves a step out; 0 without one."""
    scaler = internals.grad_scaler(engine)
    return 0.0 if scaler is None else float(scaler.get_scale())


def begin(runtime: EngineRuntime, engine: Any, options: WitnessOptions) -> None:
    """Watch an engine. Every rank calls it. If the witness cannot begin, a warning says why, and training goes on.

    Raises:
        ConfigError: there is no such check.
    """
    settings = settings_from(options)
    if settings is None or asked() is not None:  # a job that repeats a step records all of it
        return
    job = Ranks.of(None, engine.device)
    try:
        own = _made(engine, settings, job)
    except Exception as err:  # raised on all ranks
        logger.warning("unickpt: witness: it cannot watch this engine, and training goes on: %s: %s", type(err).__name__, err)
        return
    settling.install()
    if hooks.install(HOOKS, framework="DeepSpeed", version=version(), lost="no witness"):
        runtime.witnesses[engine] = own
        if settings.act:
            own.recorded.may_act()


def end(runtime: EngineRuntime, engine: Any) -> None:
    """Watch an engine no longer."""
    own = runtime.witnesses.pop(engine, None)
    if isinstance(own, EngineWitness):
        own.watching.close()


def witness_of(engine: Any) -> Witness:
    """Return what the witness of an engine has found on this rank; empty without the option ``witness``."""
    own = RUNTIME.witnesses.get(engine)
    return Witness(own.watching if isinstance(own, EngineWitness) else None)


def _made(engine: Any, settings: Settings, job: Ranks) -> EngineWitness:
    groups = job.together(lambda: internals.copy_groups(engine, engine.module.parameters()))
    among = {name: Ranks.of(group, engine.device) for name, group in groups.items()}
    held = _held(engine, {name: tuple(sorted(ranks.ranks)) for name, ranks in among.items()})
    stepped = job.together(held)
    compared = job.together(lambda: circles([ranks for ranks in among.values() if len(ranks.ranks) > 1], stepped))
    counters: list[Counters] = []
    watched = Watched(held, compared, partial(_finite, counters), int(engine.global_steps))
    checks = seeing(settings.checks, [watched], job)
    return job.together(lambda: _beginning(engine, settings, checks, job, among, watched, counters))


def _beginning(
    engine: Any,
    settings: Settings,
    checks: set[str],
    job: Ranks,
    among: dict[str, Ranks],
    watched: Watched,
    counters: list[Counters],
) -> EngineWitness:
    counters += _counters(engine) if {NONFINITE, OUTLIER} & checks else []
    tap = _tap(engine, job, among) if {BUDDY, NONFINITE, OUTLIER} & checks else None
    buddies = Buddies(tap, job) if BUDDY in checks and tap is not None and len(job.ranks) > 1 else None
    if BUDDY in checks and buddies is None:
        checks.discard(BUDDY)
        if job.leads:
            logger.warning("unickpt: witness: the check buddy needs data parallelism alone, on several ranks")
    causes = None
    if counters and tap is not None:
        causes = Causes(Recalled(tap), counters[0], job, partial(_folders, settings.batches))
    together = ranks_of(internals.groups_within_layers(engine))
    selves = Selves(Recomputed([engine.module], plain=internals.plain), job, together) if SELF in checks else None
    updates = None
    if UPDATE in checks and (updates := _updates(engine, job)) is None:
        checks.discard(UPDATE)
    watching = Watching(settings.every, checks, [watched], job, counters, buddies, causes, selves, updates)
    return EngineWitness(watching, watched)


def _updates(engine: Any, job: Ranks) -> Buddies[StepTap] | None:
    """Return what repeats steps on the partitions of ZeRO; None, with a warning, if nothing can."""
    view = EngineView(engine, KnownNames(), partitions.KnownRanges())
    base = view.base
    why = unsuited([] if base is None else [base])
    if len(job.ranks) == 1 or all(part.replicated for part in view.parts):
        why = "it needs ZeRO on several ranks. Copies are compared by replicas"
    elif any(part.stepped_by is not None for part in view.parts):
        why = "another optimizer steps on some partitions"
    if why or base is None:
        if job.leads:
            logger.warning("unickpt: witness: there is no check update: %s", why)
        return None
    names, ranges, known = KnownNames(), partitions.KnownRanges(), weakref.ref(engine)
    return Buddies(StepTap([base], lambda: _ranges(EngineView(known(), names, ranges)), job.rank), job, Kind.SDC_UPDATE)


def _ranges(view: EngineView) -> list[Range]:
    parts = [part for part in view.parts if not part.replicated]
    return [
        Range(part.master, view.names.name(piece.parameter), piece.at, piece.at + piece.hi - piece.lo)
        for part in parts
        for piece in part.pieces
        if piece.hi > piece.lo
    ]


def _folders(named: str) -> list[str]:
    """Return where micro-batches with values that are not finite are written, the best first."""
    of_round = folder_of_round()
    return [each for each in (named, "" if of_round is None else str(of_round)) if each]


def _held(engine: Any, copies: Copies) -> Held:
    """Return what reads the state of an engine. It keeps names and ranges, and not the engine."""
    names, ranges, known = KnownNames(), partitions.KnownRanges(), weakref.ref(engine)
    return lambda: held_by(EngineView(known(), names, ranges), copies)


def _counters(engine: Any) -> list[Counters]:
    try:
        return [Counters(engine.module, plain=internals.plain, parameters=engine.module.parameters())]
    except ConfigError as err:
        logger.warning("unickpt: witness: %s", err)
        return []


def _finite(counters: list[Counters]) -> bool:
    return all(each.gradients_finite() for each in counters)


def _tap(engine: Any, job: Ranks, among: dict[str, Ranks]) -> Tap | None:
    """Return what repeats micro-batches; None if a rank cannot repeat what another one has computed."""
    alone = len(among) == 1 and sorted(among[""].ranks) == sorted(job.ranks)
    if not alone or engine.pipeline_parallelism:
        return None
    trained = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    gathering = {"": engine.module} if engine.zero_optimization_partition_weights() else {}  # parameters stay the same objects
    return Tap(engine.module, trained, gathering=gathering)
