"""Which step is checked, and who repeats whose work. Every rank computes the same from the same arguments: no messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property


def is_checked(step: int, every: int) -> bool:
    """Return whether a step is checked. Steps count from 1."""
    return step > 0 and step % every == 0


@dataclass(frozen=True)
class Layout:
    """The replicas of a job.

    Attributes:
        replicas: ranks of each replica. A replica holds the whole model, such as the tensor and pipeline parallel ranks of one
            data-parallel rank. All have the same number of ranks.
        hosts: host of each rank.
    """

    replicas: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Number of the replica, and place in it, of each rank."""
        return {rank: (at, place) for at, ranks in enumerate(self.replicas) for place, rank in enumerate(ranks)}

    def apart(self, shift: int) -> int:
        """Return how many ranks have another host than the rank that many replicas further."""
        number = len(self.replicas)
        pairs = (
            pair
            for at, ranks in enumerate(self.replicas)
            for pair in zip(ranks, self.replicas[(at + shift) % number], strict=True)
        )
        return sum(self.hosts[one] != self.hosts[other] for one, other in pairs)

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Distances from a replica to those that may repeat its work, ascending."""
        return tuple(range(1, len(self.replicas)))

    @cached_property
    def best(self) -> tuple[int, ...]:
        """Those that lead the most ranks to another host."""
        apart = {shift: self.apart(shift) for shift in self.shifts}
        return tuple(shift for shift, number in apart.items() if number == max(apart.values()))


def buddies(layout: Layout, turn: int, seed: int = 0) -> dict[int, int]:
    """Return the rank that repeats the work of each rank, in the n-th check. Empty with one replica.

    Each rank repeats the work of one other, in the same place of another replica. All shifts to other hosts are used one after
    the other, so that in time every such pair of replicas meets.
    """
    return _shifted(layout, layout.best[(turn + seed) % len(layout.best)]) if len(layout.replicas) > 1 else {}


def seconds(layout: Layout, turn: int, seed: int = 0) -> dict[int, int]:
    """Return the ranks that repeat each rank's work after ``buddies`` have found a difference. Empty with two replicas.

    It has another host than the rank and its buddy for as many ranks as possible.
    """
    if len(layout.replicas) < 3:
        return {}
    first = layout.best[(turn + seed) % len(layout.best)]
    buddy = _shifted(layout, first)

    def apart(shift: int) -> int:
        second = _shifted(layout, shift)
        return sum(layout.hosts[second[rank]] not in (layout.hosts[rank], layout.hosts[buddy[rank]]) for rank in second)

    return _shifted(layout, max((shift for shift in layout.shifts if shift != first), key=apart))


def components(groups: Sequence[Collection[int]]) -> list[set[int]]:
    """Return the groups, of which those with a common rank are one."""
    found: list[set[int]] = []
    for each in groups:
        touched = [other for other in found if not other.isdisjoint(each)]
        found = [other for other in found if other.isdisjoint(each)]
        merged = set(each).union(*touched)
        found += [merged] if merged else []
    return found


def _shifted(layout: Layout, shift: int) -> dict[int, int]:
    number = len(layout.replicas)
    return {rank: layout.replicas[(at + shift) % number][place] for rank, (at, place) in layout.places.items()}
