"""Steps of simulated jobs in which nothing is wrong although steps differ in length, and of jobs that are throttled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.snapshot.steps import STEP

Lengths = npt.NDArray[np.float64]  # seconds of own time ``[rank, step]``
Chance = np.random.Generator
STEP_S = 0.08


def steady(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return equal steps with the noise of a machine."""
    return STEP_S * np.exp(np.abs(chance.normal(0, chance.uniform(0.005, 0.08), (ranks, steps))))


def uneven(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return batches of lognormal lengths, of every rank by itself."""
    return STEP_S * np.exp(chance.normal(0, chance.uniform(0.1, 1.0), (ranks, steps)))


def padded(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return batches that are as long as the longest of their samples."""
    return STEP_S * np.exp(chance.normal(0, chance.uniform(0.3, 1.0), (ranks, steps, 8)).max(axis=2))


def buckets(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return batches of equal length, bucket after bucket, each at most 64 steps long."""
    levels: list[float] = []
    run = chance.uniform(5, 40)
    while len(levels) < steps:
        levels += [chance.normal(0, 0.5)] * min(int(chance.geometric(1 / run)), 64)
    return steady(chance, ranks, steps) * np.exp(levels[:steps])


def grouped(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return batches that are sorted by length within groups of 50, as a sampler by length makes them."""
    of_group = np.sort(np.exp(chance.normal(0, chance.uniform(0.3, 0.8), (steps // 50 + 1, 50))), axis=1)
    return steady(chance, ranks, steps) * of_group[:, :: chance.choice([1, -1])].ravel()[:steps]


def in_order(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return the batches of a data set that is sorted by length, epoch after epoch."""
    epoch = np.sort(np.exp(chance.normal(0, chance.uniform(0.3, 0.8), int(chance.integers(100, 2000)))))
    return steady(chance, ranks, steps) * np.resize(epoch, steps)


def curriculum(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return steps of sequences that become longer, some tokens at a time, until they have their whole length."""
    over, power = chance.uniform(200, 2000), chance.choice([1.0, 0.5])
    share = np.minimum((np.arange(steps) + chance.integers(0, 400)) / over, 1.0) ** power
    tokens = np.floor((64 + share * (1024 - 64)) / 8) * 8
    return steady(chance, ranks, steps) * tokens / 1024 * 4


def warm_up(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return a job whose first steps compile, fill caches and tune kernels."""
    return steady(chance, ranks, steps) * (1 + 5 * np.exp(-np.arange(steps) / chance.uniform(3, 40)))


def evaluations(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return a job that evaluates every so many steps, which it does not tell."""
    every, length = int(chance.integers(10, 100)), int(chance.integers(1, 6))
    away = np.arange(steps) % every < length
    return steady(chance, ranks, steps) * np.where(away, chance.uniform(2, 50), 1.0)


def mixed(chance: Chance, ranks: int, steps: int) -> Lengths:
    """Return 20 steps of one kind after 20 of another: equal ones mostly, uneven ones now and then."""
    kinds = np.repeat(chance.random(steps // 20 + 1) < chance.uniform(0.05, 0.5), 20)[:steps]
    return np.where(kinds, chance.uniform(0.001, 0.4, (ranks, steps)), steady(chance, ranks, steps) * 0.6)


SOUND: dict[str, Callable[[Chance, int, int], Lengths]] = {
    "equal steps": steady,
    "batches of lognormal lengths": uneven,
    "batches padded to their longest sample": padded,
    "buckets of equal length, one after the other": buckets,
    "sorted by length within groups of 50": grouped,
    "a data set sorted by length": in_order,
    "a curriculum of longer sequences": curriculum,
    "first steps that compile": warm_up,
    "evaluations in the loop": evaluations,
    "uneven batches for 20 steps now and then": mixed,
}


def throttled(chance: Chance, lengths: Lengths, at: int, times: float) -> Lengths:
    """Return a job that becomes slower at a step: at once or over up to 20 steps, with clocks that then vary by a tenth."""
    steps = lengths.shape[1]
    begun = np.clip((np.arange(steps) - at + 1) / chance.integers(1, 21), 0, 1)
    clocks = 1 + begun * (chance.uniform(0, 0.1) * chance.random(steps))
    return lengths * (1 + (times - 1) * begun) * clocks


def rows(lengths: Lengths, first: int = 6) -> Any:
    """Return the steps, dtype ``STEP``, of ranks that each wait for the last one."""
    ranks, steps = lengths.shape
    found = np.zeros((steps, ranks), STEP)
    found["rank"], found["number"] = np.arange(ranks), first + np.arange(steps)[:, None]
    ends = np.cumsum(lengths.max(axis=0)) * 1e9
    found["end_ns"], found["begin_ns"] = ends[:, None], np.append(0, ends[:-1])[:, None]
    found["own_ns"] = lengths.T * 1e9
    return found.ravel()


def looks(lengths: Lengths, kept: int, every: int) -> Iterator[tuple[int, Any]]:
    """Return for each look the number of steps so far, and the newest of these as a job's first agent keeps them."""
    ranks, steps = lengths.shape
    every_row = rows(lengths)
    for count in range(every, steps + 1, every):
        yield count, every_row[max(0, count - kept) * ranks : count * ranks]
