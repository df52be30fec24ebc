"""The replicas of a job, which can repeat each other's work, and the ranks that compute something together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.schedule import Layout, components


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a job. Ranks are numbers in the list of all.

    Attributes:
        layout: the replicas.
        units: those that compute parts of the same layers, each rank once. A unit lies in one replica.
    """

    layout: Layout
    units: tuple[tuple[int, ...], ...]


def each_alone(ranks: Ranks) -> Replicas:
    """Return the replicas of data parallelism alone: each rank is one."""
    every = tuple((row,) for row in range(len(ranks.ranks)))
    return Replicas(Layout(every, ranks.hosts), every)


def replicas_of(ranks: Ranks, copies: Collection[int], within: Collection[int]) -> Replicas | None:
    """Return the replicas of a job with model parallelism. Every rank calls it.

    Args:
        ranks: all of the job.
        copies: global ranks with the same part of the model as this one, in the order of the replicas, this one among them.
        within: global ranks that compute parts of the same layers as this one.

    Returns:
        None if there is one replica, or if ranks of several replicas compute parts of the same layers.
    """
    number = {rank: row for row, rank in enumerate(ranks.ranks)}
    told = ranks.gather_objects(([number[each] for each in copies], {number[each] for each in within}))
    places = sorted({tuple(same) for same, _ in told})
    if len({len(each) for each in places}) != 1 or len(places[0]) < 2:
        return None
    replicas = tuple(zip(*places, strict=True))
    units = components([{row, *those} for row, (_, those) in enumerate(told)])
    if not all(any(unit <= set(replica) for replica in replicas) for unit in units):
        return None
    return Replicas(Layout(replicas, ranks.hosts), tuple(tuple(sorted(unit)) for unit in units))
