"""The checks ``buddy`` and ``update``: other ranks repeat what each rank has computed, and compare.

It is a micro-batch, whose output and gradients are compared before any reduction, or the step of the optimizer on a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch

from unickpt.base.listing import some
from unickpt.base.logs import logger
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.hashes import combined
from unickpt.training.witness.repeating import Case
from unickpt.training.witness.schedule import Layout, buddies, seconds
from unickpt.training.witness.settings import BUDDY, UPDATE
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, vote

REPEATS = 3
MICRO_BATCH = 0  # of a checked step, which is repeated


class Repeater(Protocol):
    """Records something, and repeats it."""

    @property
    def names(self) -> Sequence[str]: ...
    def close(self) -> None: ...
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
    """

    def __init__(self, tap: R, ranks: Ranks, kind: Kind = Kind.SDC_COMPUTE) -> None:
        self.tap, self.off, self._kind = tap, "", kind
        self._ranks = ranks
        self._own = ranks.ranks.index(ranks.rank)
        self._gated = False

    @cached_property
    def _layout(self) -> Layout:
        """Rows of what the ranks gather stand for the ranks."""
        return Layout(tuple((row,) for row in range(len(self._ranks.ranks))), self._ranks.hosts)

    def check(self, step: int, turn: int) -> list[Verdict] | None:
        """Return the verdicts about what each rank has recorded; None if nothing was compared.

        Args:
            step: that begins now.
            turn: number of the check.
        """
        case, why = self.tap.take()
        if bool(self._ranks.gather(torch.tensor([case is None])).any()):
            if self._kind not in _OPTIONAL:
                self._stop(why or "it cannot be repeated on another rank")
            return None
        assert case is not None
        first = buddies(self._layout, turn)
        values = self._ranks.gather(torch.tensor([case.values, self._repeated(case, first)]))
        original, repeated = values[:, 0], values[:, 1]
        suspects = [row for row, buddy in first.items() if not torch.equal(original[row], repeated[buddy])]
        whats = self._ranks.gather_objects(case.what) if suspects or not self._gated else []
        if whats:
            unsteady = self._gate(case, original, step, whats)
            if unsteady is not None or self.off:
                return None if unsteady is None else [unsteady]
        if not suspects:
            return []
        second = seconds(self._layout, turn)
        again = self._ranks.gather(torch.tensor([self._repeated(case, second)]))[:, 0] if second else None
        found = []
        for row in suspects:
            told = {row: original[row], first[row]: repeated[first[row]]}
            if again is not None:
                told[second[row]] = again[second[row]]
            found.append(self._vote(told, step, whats[row]))
        return [each for each in found if each is not None]

    def _repeated(self, case: Case, by: dict[int, int]) -> tuple[int, ...]:
        """Send the case to the rank that repeats it, and return what this rank finds of the case that it gets."""
        source = next(row for row, other in by.items() if other == self._own)
        data = self._ranks.pass_on(case.data, to=by[self._own], source=source)
        return self._ranks.together(lambda: self.tap.repeat(data))

    def _gate(self, case: Case, original: torch.Tensor, step: int, whats: Sequence[str]) -> Verdict | None:
        """Let each rank repeat its own micro-batch. Return a verdict if results differ each time, which ends the check.

        It also ends if half of the ranks or more, and several, cannot repeat what they computed: then gradients depend on more
        than the input and the gradient of the output.
        """
        own = self._ranks.together(lambda: [self.tap.repeat(case.data) for _ in range(REPEATS)])
        repeats = self._ranks.gather(torch.tensor(own))
        self._gated = True
        unsteady = (repeats != repeats[:, :1]).any(1)
        if bool(unsteady.any()):
            what = whats[int(unsteady.any(1).nonzero()[0])]
            subject = self._subject(what or self._called(unsteady.any(0)), step)
            self._stop("an operator has another result each time")
            return vote(self._kind, subject, [self._ballot(row, repeats[row]) for row in range(len(repeats))])
        other = (original != repeats[:, 0]).any(1)
        if int(other.sum()) > 1 and 2 * int(other.sum()) >= len(other):
            what = self._called((original != repeats[:, 0]).any(0))
            self._stop(f"the ranks cannot repeat {what} from {_FROM[self._kind]}")
        return None

    def _vote(self, told: dict[int, torch.Tensor], step: int, what: str) -> Verdict | None:
        values = torch.stack(list(told.values()))
        subject = self._subject(what or self._called((values != values[:1]).any(0)), step)
        return vote(self._kind, subject, [self._ballot(row, each[None]) for row, each in told.items()])

    def _subject(self, what: str, step: int) -> Subject:
        return Subject(what, step, MICRO_BATCH if self._kind is Kind.SDC_COMPUTE else None)

    def _ballot(self, row: int, values: torch.Tensor) -> Ballot:
        return Ballot(self._ranks.ranks[row], self._ranks.hosts[row], tuple(map(combined, values)))

    def _called(self, columns: torch.Tensor) -> str:
        return some(_named(self.tap.names, columns.tolist()), most=3)

    def _stop(self, why: str) -> None:
        self.off = why
        if self._ranks.leads:
            logger.warning("unickpt: witness: the check %s ends: %s", _NAME[self._kind], why)


_FROM = {
    Kind.SDC_COMPUTE: "the input of the model and the gradient of its output",
    Kind.SDC_UPDATE: "weight, gradient and states before the step",
}
_NAME = {Kind.SDC_COMPUTE: BUDDY, Kind.SDC_UPDATE: UPDATE}


def _named(names: Sequence[str], chosen: Iterable[bool]) -> list[str]:
    return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
