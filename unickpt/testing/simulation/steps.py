"""Durations of steps and transfers of a sound job, or of one with a slow rank or link.

In every microbatch, the ranks of a tensor parallel group wait for the slowest of them. Stages wait for each other as in a
pipeline that fills and drains. At the end of a step all ranks wait for each other. So a slow rank lengthens the step of all
ranks, but only its own time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.p2p_links import TRANSFER, TransferRows
from unickpt.diagnosis.snapshot.steps import STEP, StepRows
from unickpt.testing.simulation.calls import BACKWARD_NS, FORWARD_NS, MS, OPTIMIZER_NS, TRANSFER_NS
from unickpt.testing.simulation.layout import ParallelLayout

FIRST_STAGE, LAST_STAGE = 1.1, 1.3  # embedding and loss: factors of the work of a stage
JITTER = 0.03  # standard deviation of the logarithm of a computation's duration
ALWAYS = 0.005  # lasting differences between processors
PAUSE_SHARE, PAUSE_NS = 0.01, 10 * MS  # share of steps with a pause by the system, and its mean
GARBAGE_EVERY, GARBAGE_NS = 10, 15 * MS
MOST_STEPS = 0.8  # share of steps with a collection, of a rank that collects too often
WARM_UP_STEPS, WARM_UP_TIMES = 3, 5.0
LINK_JITTER = 0.1
TRANSFERRED_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Slowness:
    """Slow rank or links.

    Attributes:
        rank: slow rank; -1 for none.
        sleep_ns: sleep in each of its steps.
        starved: mean factor of its computations.
        data_ns: wait for data in each of its steps.
        garbage_ns: garbage collection in most of its steps.
        links: factor for transfers by source and destination.
    """

    rank: int = -1
    sleep_ns: float = 0.0
    starved: float = 1.0
    data_ns: float = 0.0
    garbage_ns: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of ``timed``.

    Attributes:
        steps: steps of all ranks.
        transfers: transfers of the last steps.
        end_ns: end of the last step, on the job's clock.
    """

    steps: StepRows
    transfers: TransferRows
    end_ns: int


def timed(
    layout: ParallelLayout,
    microbatches: int,
    count: int,
    slow: Slowness,
    skew_ns: Floats,
    random: np.random.Generator,
    *,
    transfer_steps: int,
) -> Timed:
    """Simulate the first steps of a job.

    Args:
        layout: layout of the job.
        microbatches: microbatches of a step.
        count: number of steps.
        slow: slow rank or links.
        skew_ns: ``[hosts]``, remaining clock differences.
        random: source of all variation.
        transfer_steps: number of last steps whose transfers are returned.
    """
    shape = (layout.pp, layout.dp, layout.tp)
    weight = np.ones(layout.pp)
    weight[0], weight[-1] = FIRST_STAGE, LAST_STAGE  # irrelevant for a single stage
    weights = weight[:, None, None] * np.exp(ALWAYS * random.standard_normal(shape))
    turn = random.integers(0, GARBAGE_EVERY, shape)
    place = layout.place(slow.rank) if slow.rank >= 0 else None
    skews = skew_ns[layout.hosts()].reshape(shape)
    calls = np.arange(1, 4, dtype=np.uint64)[
        np.where(np.arange(layout.pp) == 0, 0, 1) + (np.arange(layout.pp) == layout.pp - 1)
    ]
    times = _times(layout, slow)
    out = np.zeros((count, *shape), STEP)
    out["rank"] = np.arange(layout.world).reshape(shape)
    out["calls"] = calls[:, None, None]
    transfers, clock = [], 0.0
    for number in range(count):
        long = WARM_UP_TIMES if number < WARM_UP_STEPS else 1.0
        forward, backward = (
            long * ns * weights * _varying(random, JITTER, (microbatches, *shape)) for ns in (FORWARD_NS, BACKWARD_NS)
        )
        pauses = np.where(random.random(shape) < PAUSE_SHARE, random.exponential(PAUSE_NS, shape), 0.0)
        garbage = np.where(turn == number % GARBAGE_EVERY, GARBAGE_NS * random.uniform(0.5, 1.5, shape), 0.0)
        data = np.zeros(shape)
        if place is not None:
            stage, replica, tensor = place
            if slow.starved != 1.0:
                for part in (forward, backward):
                    part[:, stage, replica, tensor] *= slow.starved * np.exp(0.2 * random.standard_normal(microbatches))
            pauses[place] += slow.sleep_ns
            if slow.data_ns:
                data[place] += slow.data_ns * random.uniform(0.5, 1.5)
            if slow.garbage_ns and random.random() < MOST_STEPS:
                garbage[place] += slow.garbage_ns * random.uniform(0.3, 1.7)
        forward[0] += pauses + garbage + data
        optimizer = OPTIMIZER_NS * weights * _varying(random, JITTER, shape)
        carried = TRANSFER_NS * times[:, None] * _varying(random, LINK_JITTER, (2, microbatches, layout.pp - 1, *shape[1:]))
        end = clock + _pipeline(forward.max(axis=3), backward.max(axis=3), carried.max(axis=4)) + float(optimizer.max())
        step = out[number]
        step["number"], step["data_ns"], step["garbage_ns"] = number + 1, data, garbage
        step["own_ns"] = forward.sum(axis=0) + backward.sum(axis=0) + optimizer
        step["begin_ns"], step["end_ns"] = clock + skews, end + skews
        if number >= count - transfer_steps:
            transfers.append(_transfers(layout, carried, skews))
        clock = end
    return Timed(out.ravel(), np.concatenate([np.zeros(0, TRANSFER), *transfers]), int(clock))


def _varying(random: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = np.exp(np.float32(sigma) * random.standard_normal(shape, np.float32))
    return found


def _times(layout: ParallelLayout, slow: Slowness) -> Floats:
    """Return factors of transfers: ``[direction, stage nearer to the first, replica, tensor]``."""
    out = np.ones((2, layout.pp - 1, layout.dp, layout.tp))
    for (source, destination), factor in slow.links.items():
        stage, replica, tensor = layout.place(min(source, destination))
        out[int(source > destination), stage, replica, tensor] = factor
    return out


def _pipeline(forward: Floats, backward: Floats, carried: Floats) -> float:
    """Return the nanoseconds until all replicas have finished their last backward computation.

    Args:
        forward, backward: ``[microbatches, stages, replicas]``.
        carried: ``[direction, microbatches, stages - 1, replicas]``.
    """
    microbatches, stages, replicas = forward.shape
    free = np.zeros((stages, replicas))
    for at in range(microbatches):
        ready = np.zeros(replicas)
        for stage in range(stages):
            free[stage] = np.maximum(free[stage], ready) + forward[at, stage]
            if stage < stages - 1:
                ready = free[stage] + carried[0, at, stage]
    for at in range(microbatches):
        ready = np.zeros(replicas)
        for stage in reversed(range(stages)):
            free[stage] = np.maximum(free[stage], ready) + backward[at, stage]
            if stage:
                ready = free[stage] + carried[1, at, stage - 1]
    return float(free.max())


def _transfers(layout: ParallelLayout, carried: Floats, skews: Floats) -> TransferRows:
    """Return the transfers as seen from two clocks."""
    ranks = np.arange(layout.world).reshape(skews.shape)
    out = np.zeros(carried.shape, TRANSFER)
    out["source"][0], out["destination"][0] = ranks[:-1], ranks[1:]
    out["source"][1], out["destination"][1] = ranks[1:], ranks[:-1]
    difference = skews[1:] - skews[:-1]
    out["ns"] = np.maximum(carried + np.stack([difference, -difference])[:, None], 0.0)
    out["bytes"] = TRANSFERRED_BYTES
    found: TransferRows = out.ravel()
    return found
