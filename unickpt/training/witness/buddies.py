"""The checks ``buddy`` and ``update``: other ranks repeat what each rank has computed, and compare.

It is a micro-batch, whose output and gradients are compared before any reduction, or the step of the optimizer on a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from unickpt.base.errors import CoordinationError
from unickpt.base.listing import some
from unickpt.base.logs import logger
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.cases import Case
from unickpt.training.witness.hashes import combined
from unickpt.training.witness.replicas import Replicas, each_alone
from unickpt.training.witness.schedule import buddies, seconds
from unickpt.training.witness.settings import BUDDY, UPDATE
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, vote

REPEATS = 3
MICRO_BATCH = 0  # of a checked step, which is repeated


class Repeater(Protocol):
    """Records something, and repeats it."""

    @property
    def names(self) -> Sequence[str]: ...
    def close(self) -> None: ...
    def arm(self, turn: int) -> None: ...
    def take(self) -> tuple[Case | None, str]: ...
    def repeat(self, data: bytes) -> tuple[int, ...]: ...


R = TypeVar("R", bound=Repeater)
_OPTIONAL = {Kind.SDC_UPDATE}  # what a step may lack


class Buddies(Generic[R]):
    """The check in one job. Its methods that exchange something are called on every rank.

    Attributes:
        off: why nothing is compared any more, or ''.

    Args:
        tap: of this rank.
        ranks: those that can repeat each other's work.
        kind: the suspicion: SDC_COMPUTE, or SDC_UPDATE.
        replicas: of the job (``replicas_of``); None: each rank is one.
    """

    def __init__(self, tap: R, ranks: Ranks, kind: Kind = Kind.SDC_COMPUTE, replicas: Replicas | None = None) -> None:
        self.tap, self.off, self._kind = tap, "", kind
        self._ranks = ranks
        self._own = ranks.ranks.index(ranks.rank)
        replicas = replicas or each_alone(ranks)
        self._layout, self._units = replicas.layout, replicas.units
        self._gated = False

    def check(self, step: int, turn: int) -> list[Verdict] | None:
        """Return the verdicts about what each rank has recorded; None if nothing was compared.

        What fails on all ranks ends the check.

        Args:
            step: that begins now.
            turn: number of the check.
        """
        try:
            return self._check(step, turn)
        except Exception as err:  # of any model: other checks go on
            self._stop(f"{type(err).__name__}: {err}", told=not isinstance(err, CoordinationError))
            return None

    def _check(self, step: int, turn: int) -> list[Verdict] | None:
        case, why = self._taken()
        own = [case is None, 0 if case is None else len(case.values), bool(why) or self._kind not in _OPTIONAL]
        taken = self._ranks.gather(torch.tensor(own, device="cpu").long())
        if bool(taken[:, 0].any()):
            if bool((taken[:, 0] & taken[:, 2]).any()):
                said = next(filter(None, self._ranks.gather_objects(why)), "it cannot be repeated on another rank")
                self._stop(said)
            return None
        assert case is not None
        width = int(taken[:, 1].max())
        first = buddies(self._layout, turn)
        values = self._ranks.gather(
            torch.tensor([_padded(each, width) for each in (case.values, self._repeated(case, first))], device="cpu")
        )
        original, repeated = values[:, 0], values[:, 1]
        rows = {row for row, buddy in first.items() if not torch.equal(original[row], repeated[buddy])}
        suspects = [unit for unit in self._units if not rows.isdisjoint(unit)]
        if suspects or not self._gated:
            unsteady = self._gate(case, original, step)
            if unsteady is not None or self.off:
                return None if unsteady is None else [unsteady]
        if not suspects:
            return []
        told = [original, torch.stack([repeated[first[row]] for row in range(len(original))])]
        if second := seconds(self._layout, turn):
            again = self._ranks.gather(torch.tensor(_padded(self._repeated(case, second), width), device="cpu"))
            told.append(torch.stack([again[second[row]] for row in range(len(original))]))
        by = [{row: row for row in first}, first, *[second] * bool(second)]
        every = torch.stack(told)
        named = self._names((every != every[:1]).any(0), case)
        found = [self._vote(unit, every, by, named, step) for unit in suspects]
        return [each for each in found if each is not None]

    def _taken(self) -> tuple[Case | None, str]:
        """Return what this rank has recorded. An error would leave the other ranks waiting."""
        try:
            return self.tap.take()
        except Exception as err:  # of any object that the program passes to its model, or of a machine without memory
            return None, f"what was recorded cannot be sent to another rank: {type(err).__name__}: {err}"

    def _repeated(self, case: Case, by: dict[int, int]) -> tuple[int, ...]:
        """Send the case to the rank that repeats it, and return what this rank finds of the case that it gets."""
        source = next(row for row, other in by.items() if other == self._own)
        data = self._ranks.pass_on(case.data, to=by[self._own], source=source)
        return self._ranks.together(lambda: self.tap.repeat(data))

    def _gate(self, case: Case, original: torch.Tensor, step: int) -> Verdict | None:
        """Let each rank repeat its own micro-batch. Return a verdict if results differ each time, which ends the check.

        It also ends if half of those that compute something or more, and several, cannot repeat it: then gradients depend on
        more than the input and the gradient of the output.
        """
        own = self._ranks.together(lambda: [self.tap.repeat(case.data) for _ in range(REPEATS)])
        repeats = self._ranks.gather(torch.tensor([_padded(each, original.shape[1]) for each in own], device="cpu"))
        self._gated = True
        unsteady = repeats != repeats[:, :1]
        if bool(unsteady.any()):
            named = self._names(unsteady.any(1), case)
            subject = self._subject(next(filter(None, named)), step)
            self._stop("an operator has another result each time")
            return vote(self._kind, subject, [self._ballot(row, repeats[row]) for row in range(len(repeats))])
        differs = original != repeats[:, 0]
        rows = set(differs.any(1).nonzero()[:, 0].tolist())
        other = [unit for unit in self._units if not rows.isdisjoint(unit)]
        if len(other) > 1 and 2 * len(other) >= len(self._units):
            what = next(filter(None, self._names(differs, case)))
            self._stop(f"the ranks cannot repeat {what} from {_FROM[self._kind]}")
        return None

    def _names(self, differing: torch.Tensor, case: Case) -> list[str]:
        """Return the names of each rank for its own values that differ: ranks may have other layers. '': none does."""
        own = differing[self._own, : len(self.tap.names)]  # of the ranks with the most layers there are more
        name = "" if not bool(own.any()) else case.what or some(_named(self.tap.names, own.tolist()), most=3)
        return self._ranks.gather_objects(name)

    def _vote(
        self, unit: Sequence[int], values: torch.Tensor, by: Sequence[dict[int, int]], named: Sequence[str], step: int
    ) -> Verdict | None:
        """Return the verdict on what a unit has computed: ``values`` are its own first, then those of who repeated it."""
        subject = self._subject(next(filter(None, (named[row] for row in unit)), ""), step, together=len(unit) > 1)
        ballots = []
        for told, of in zip(values, by, strict=True):
            rows = [of[row] for row in unit]
            beside = tuple((self._ranks.ranks[row], self._ranks.hosts[row]) for row in rows[1:])
            value = combined(told[list(unit)].reshape(-1))
            ballots.append(Ballot(self._ranks.ranks[rows[0]], self._ranks.hosts[rows[0]], (value,), beside))
        return vote(self._kind, subject, ballots)

    def _subject(self, what: str, step: int, *, together: bool = False) -> Subject:
        return Subject(what, step, MICRO_BATCH if self._kind is Kind.SDC_COMPUTE else None, together=together)

    def _ballot(self, row: int, values: torch.Tensor) -> Ballot:
        return Ballot(self._ranks.ranks[row], self._ranks.hosts[row], tuple(map(combined, values)))

    def _stop(self, why: str, *, told: bool = False) -> None:
        """End the check. ``told``: this rank says so, and not only the one that leads."""
        self.off = why
        if told or self._ranks.leads:
            logger.warning("unickpt: witness: the check %s ends: %s", _NAME[self._kind], why)


def _padded(values: Sequence[int], width: int) -> list[int]:
    return [*values, *[0] * (width - len(values))]


_FROM = {
    Kind.SDC_COMPUTE: "the input of the model and the gradient of its output",
    Kind.SDC_UPDATE: "weight, gradient and states before the step",
}
_NAME = {Kind.SDC_COMPUTE: BUDDY, Kind.SDC_UPDATE: UPDATE}


def _named(names: Sequence[str], chosen: Iterable[bool]) -> list[str]:
    return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
