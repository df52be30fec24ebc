"""A witness at work: what happens before and after each step of an optimizer. Adapters call ``before`` and ``after``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from unickpt.base.logs import logger
from unickpt.training.witness import words
from unickpt.training.witness.agreeing import Circle, Ranks
from unickpt.training.witness.buddies import Buddies
from unickpt.training.witness.causes import Causes
from unickpt.training.witness.comparing import Changed, compare_at_rest, compare_replicas
from unickpt.training.witness.counting import Counters, all_finite
from unickpt.training.witness.held import WEIGHT, Snapshot, Stepped
from unickpt.training.witness.nonfinite import Cause, NonFinite
from unickpt.training.witness.recomputing import Recomputed, Selves
from unickpt.training.witness.record import passed_by_all
from unickpt.training.witness.schedule import is_checked
from unickpt.training.witness.settings import BUDDY, NONFINITE, OUTLIER, REPLICAS, REST, SELF, UPDATE
from unickpt.training.witness.updating import StepTap
from unickpt.training.witness.vote import Verdict, serious


@dataclass
class Watched:
    """An optimizer.

    Attributes:
        held: returns what its steps change on this rank, always the same parameters in the same order.
        circles: who compares copies of them.
        finite: whether all gradients that the next step uses are finite.
        step: steps done.
        snapshot: of the end of a checked step, until the next step begins.
        nonfinite: what was found before the step that runs now: values that are not finite, or outliers.
        bad_weights: the weights of this rank were not finite either.
        last: last passed step by check.
    """

    held: Callable[[], Sequence[Stepped]]
    circles: Sequence[Circle]
    finite: Callable[[], bool]
    step: int = 0
    snapshot: Snapshot | None = None
    nonfinite: NonFinite | None = None
    bad_weights: bool = False
    last: dict[str, int] = field(default_factory=dict)

    def snapshot_of(self, step: int) -> Snapshot:
        """Take a snapshot now. Raises ConfigError if the optimizer has other parameters than ``circles`` compare."""
        held = self.held()
        for circle in self.circles:
            circle.require_in(held)
        return Snapshot.of(held, step)


@dataclass(eq=False)
class Watching:
    """A witness at work. Its failures end it, on all ranks, and not training.

    Attributes:
        every: steps from one check to the next.
        checks: those that see something in this job.
        watched: the optimizers.
        job: all ranks.
        causes: finds out why values are not finite.
        selves: compares what the backward pass computes again.
        updates: compares steps of the optimizer.
        late: copies are compared when the next step begins, because weights are complete only then.
        off: why nothing is watched any more, or ''.
        said: what is told once, such as copies that differ.
        wrong: there was a verdict about wrong numbers. Nothing passes after it.
        wrongs: called with the first such verdict.
        tells: called with what is logged, on the rank that logs it.
        hooks: what ``close`` removes.
    """

    every: int
    checks: set[str]
    watched: Sequence[Watched]
    job: Ranks
    counters: Sequence[Counters] = ()
    buddies: Buddies[Any] | None = None
    causes: Causes | None = None
    selves: Selves | None = None
    updates: Buddies[StepTap] | None = None
    late: bool = False
    off: str = ""
    verdicts: list[Verdict | NonFinite] = field(default_factory=list)
    said: set[Hashable] = field(default_factory=set)
    wrong: bool = False
    wrongs: list[Callable[[Verdict], None]] = field(default_factory=list)
    tells: list[Callable[[Verdict | NonFinite], None]] = field(default_factory=list)
    hooks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _watching.add(self)
        self._arm()

    def close(self) -> None:
        """Stop watching."""
        _watching.discard(self)
        for remove in self.hooks:
            remove()
        self.hooks.clear()
        for each in self.counters:
            each.close()
        if self.buddies is not None:
            self.buddies.tap.close()
        if self.causes is not None:
            self.causes.close()
        if self.selves is not None:
            self.selves.recomputed.close()
        if self.updates is not None:
            self.updates.tap.close()

    def passed(self) -> tuple[int, tuple[str, ...]]:
        """Return the last step that passed, and the checks. After a verdict about wrong numbers nothing passes any more."""
        of_optimizers = {number: each.last for number, each in enumerate(self.watched)}
        several = (BUDDY, self.buddies), (SELF, self.selves), (UPDATE, self.updates)
        ended = {name for name, each in several if each is not None and each.off}
        return passed_by_all(of_optimizers, self.checks - ended - {NONFINITE, OUTLIER})

    def forget(self) -> None:
        """The program is about to write to what was seen after the last step."""
        for each in self.watched:
            if each.snapshot is not None:
                each.snapshot.forgotten = True

    def before(self, watched: Watched) -> None:
        """A step begins."""
        self._guarded(self._before, watched)

    def after(self, watched: Watched, *, applied: bool = True) -> None:
        """A step has ended. ``applied``: a loss scaler did not leave it out."""
        self._guarded(partial(self._after, applied=applied), watched)

    def _guarded(self, act: Callable[[Watched], None], watched: Watched) -> None:
        if self.off:
            return
        try:
            with torch.no_grad():
                act(watched)
        except Exception as err:  # training goes on, whatever fails here
            self.off = f"{type(err).__name__}: {err}"
            logger.warning("unickpt: witness: it ends, and training goes on: %s", self.off)
            with suppress(Exception):
                self.close()

    def _alone(self, act: Callable[[], None]) -> None:
        """Do something for ``nonfinite``. This check ends on one rank alone, which tells the others nothing of it."""
        if not self.counters:
            return
        try:
            act()
        except Exception as err:
            logger.warning("unickpt: witness: the check nonfinite ends: %s: %s", type(err).__name__, err)
            for each in self.counters:
                each.close()
            self.counters = ()

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Let nothing count what is repeated."""
        some: list[Counters | Recomputed] = [*self.counters]
        some += [] if self.selves is None else [self.selves.recomputed]
        for each in some:
            each.paused = True
        try:
            yield
        finally:
            for each in some:
                each.paused = False

    def _before(self, watched: Watched) -> None:
        watched.nonfinite = None
        self._alone(partial(self._count, watched))
        if self.causes is not None:
            self._decide(self.causes, watched)
        if self.buddies is not None and not self.buddies.off and is_checked(watched.step + 1, self.every):
            self._ask(self.buddies, watched)
        if self.selves is not None and not self.selves.off and is_checked(self.watched[0].step + 1, self.every):
            self._compare_selves(self.selves, watched)
        snapshot, watched.snapshot = watched.snapshot, None
        if snapshot is None:
            return
        if REST in self.checks:
            self._compare_at_rest(watched, snapshot)
        if REPLICAS in self.checks and self.late:
            self._compare_replicas(watched, self.job.together(partial(watched.snapshot_of, snapshot.step)))

    def _after(self, watched: Watched, *, applied: bool) -> None:
        self._alone(partial(self._tell_nonfinite, watched, applied=applied))
        if self.causes is not None:
            self.causes.ended(watched.step + 1, applied=applied, every=self.every)
        watched.step += 1
        if self.updates is not None and not self.updates.off and is_checked(watched.step, self.every):
            verdicts = self.updates.check(watched.step, watched.step // self.every)
            if verdicts is not None:
                self._told(watched, UPDATE, watched.step, verdicts)
        self._arm()
        if not is_checked(watched.step, self.every) or not {REST, REPLICAS} & self.checks:
            return
        snapshot = self.job.together(partial(watched.snapshot_of, watched.step))
        if REST in self.checks or self.late:
            watched.snapshot = snapshot
        if REPLICAS in self.checks and not self.late:
            self._compare_replicas(watched, snapshot)

    def _compare_at_rest(self, watched: Watched, snapshot: Snapshot) -> None:
        def compared() -> tuple[list[Changed], bool]:
            held = watched.held()
            changed, any_compared = snapshot.changed(held)
            return [(held[at].called(key), held[at].ranks) for at, key in changed], any_compared

        changed, any_compared = self.job.together(compared)
        verdicts = compare_at_rest(changed, snapshot.step, self.job)
        if any_compared or verdicts:
            self._told(watched, REST, snapshot.step, verdicts)
        elif not snapshot.forgotten and self._is_news("left out"):
            logger.warning(
                "unickpt: witness: the program writes to all weights and states between two steps: the check rest sees nothing"
            )

    def _compare_replicas(self, watched: Watched, snapshot: Snapshot) -> None:
        held = watched.held()
        own = [each for circle in watched.circles for each in compare_replicas(snapshot, held, circle)]
        found = own
        if any(len(each.ranks.ranks) < len(self.job.ranks) for each in watched.circles):
            found = self._of_all(own)
        self._told(watched, REPLICAS, snapshot.step, found)

    def _of_all(self, own: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts of all circles, each once."""
        if not bool(self.job.gather(torch.tensor([len(own)], device="cpu")).any()):
            return []
        return list(dict.fromkeys(each for of_rank in self.job.gather_objects(list(own)) for each in of_rank))

    def _arm(self) -> None:
        if not is_checked(self.watched[0].step + 1, self.every):
            return
        if self.buddies is not None and not self.buddies.off:
            self.buddies.tap.arm((self.watched[0].step + 1) // self.every)
        if self.selves is not None and not self.selves.off:
            self.selves.recomputed.arm()
        if self.updates is not None and not self.updates.off:
            self.updates.tap.arm((self.watched[0].step + 1) // self.every)

    def _compare_selves(self, selves: Selves, watched: Watched) -> None:
        """Compare what was computed twice, when the first optimizer steps. What passes, passes for all."""
        step = watched.step + 1
        verdicts = selves.check(step) if watched is self.watched[0] else None
        if verdicts is not None and (verdicts or not selves.off):
            for each in self.watched[1:] if not verdicts and not self.wrong else ():
                each.last[SELF] = step
            self._told(watched, SELF, step, verdicts)

    def _ask(self, buddies: Buddies[Any], watched: Watched) -> None:
        step = watched.step + 1
        with self._pausing():
            verdicts = buddies.check(step, step // self.every)
        if verdicts is not None:
            self._told(watched, BUDDY, step, verdicts)

    def _count(self, watched: Watched) -> None:
        if self._is_news("first") and all(each.blind() for each in self.counters) and self.job.leads:
            logger.warning(
                "unickpt: witness: nonfinite and outlier see no layers: the program has compiled the model since, or calls "
                "another one"
            )
        place = None
        if NONFINITE in self.checks:
            place = next(filter(None, (each.found(watched.finite) for each in self.counters)), None)
        if place is None:
            outliers = [each.outlier() for each in self.counters] if OUTLIER in self.checks else []
            outlier = next(filter(None, outliers), None)
            if outlier is not None:
                watched.bad_weights = False
                watched.nonfinite = NonFinite(outlier[0], watched.step + 1, self.job.rank, self.job.host, times=outlier[1])
            return
        weights = (tensor for each in watched.held() for key, tensor in each.read() if key == WEIGHT)
        watched.bad_weights = not all_finite(weights)
        watched.nonfinite = NonFinite(place, watched.step + 1, self.job.rank, self.job.host)

    def _decide(self, causes: Causes, watched: Watched) -> None:
        found = watched.nonfinite
        with self._pausing():
            cause = causes.cause_of(
                None if found is None else found.place, watched.step + 1,
                weights=found is not None and watched.bad_weights, large=found is not None and bool(found.times),
            )  # fmt: skip
        if found is not None:
            watched.nonfinite = None if cause is None else replace(found, cause=cause)

    def _tell_nonfinite(self, watched: Watched, *, applied: bool) -> None:
        found, watched.nonfinite = watched.nonfinite, None
        if found is not None and applied:
            if watched.bad_weights and found.cause is not Cause.HARDWARE:
                if self._is_news("weights"):
                    logger.warning(
                        "unickpt: witness: step %d: rank %d has weights that were not finite before; look for an earlier "
                        "NONFINITE", found.step, found.rank,
                    )  # fmt: skip
            else:
                self._told_nonfinite(found)
        for each in self.counters:
            each.clear()

    def _told_nonfinite(self, found: NonFinite) -> None:
        if self._is_news((found.kind, found.place.layer, found.place.backward, found.cause)):
            if self.causes is not None and found.cause is Cause.DATA_OR_MODEL:
                found = replace(found, batch=self.causes.written(found))
            logger.error("unickpt: witness: %s. Next: %s", words.nonfinite(found), words.next_nonfinite(found))
            self._tell(found)
        self.verdicts.append(found)

    def _told(self, watched: Watched, check: str, step: int, verdicts: Sequence[Verdict]) -> None:
        if not verdicts and not self.wrong:
            watched.last[check] = step
        fault = serious(verdicts)
        if fault is not None and not self.wrong:
            self.wrong = True
            for call in self.wrongs:
                call(fault)
        for each in verdicts:
            if check == REPLICAS and not self._is_news((each.kind, each.subject.what, each.ranks)):
                continue  # a copy that differs does so in every later check
            self.verdicts.append(each)
            if self.job.leads:
                logger.error("unickpt: witness: %s. Next: %s", words.text(each), words.next_steps(each))
                self._tell(each)

    def _tell(self, found: Verdict | NonFinite) -> None:
        for call in self.tells:
            call(found)

    def _is_news(self, what: Hashable) -> bool:
        """Return whether something was not told before, and note it."""
        news = what not in self.said
        self.said.add(what)
        return news


def seeing(checks: Iterable[str], watched: Sequence[Watched], job: Ranks) -> set[str]:
    """Return the checks without ``replicas``, if no rank of the job has anything to compare there. Every rank calls it."""
    found = set(checks)
    own = any(circle.compares for each in watched for circle in each.circles)
    if REPLICAS in found and not bool(job.gather(torch.tensor([own], device="cpu").int()).any()):
        found.discard(REPLICAS)
        if job.leads:
            logger.warning("unickpt: witness: no parameter has a copy on another rank, so the check replicas sees nothing")
    return found


_watching: WeakSet[Watching] = WeakSet()  # of this process: what writes does not know of the witnesses


def forget_all() -> None:
    """Let no witness of this process compare what it has seen: before code other than a step changes weights or states."""
    for each in list(_watching):
        each.forget()
