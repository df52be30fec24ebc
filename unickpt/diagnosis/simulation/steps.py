"""Steps of a job that only varies, or of one in which a rank or a link is slow: what all ranks and links are seen to take.

All ranks of a tensor parallel group wait for the slowest of them in every microbatch, stages wait for each other as in a
pipeline that fills and drains, and at the end of a step all wait for all. So the step of all gets longer, and the own time only
of the rank that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.links import TRANSFER, Transfers
from unickpt.diagnosis.middles import Floats
from unickpt.diagnosis.simulation.calls import BACKWARD_NS, FORWARD_NS, MS, OPTIMIZER_NS, TRANSFER_NS
from unickpt.diagnosis.simulation.layout import Layout
from unickpt.diagnosis.steps import STEP, Steps

FIRST_STAGE, LAST_STAGE = 1.1, 1.3  # embedding, and the loss: times the work of the others
JITTER = 0.03  # of a computation, standard deviation of its logarithm
ALWAYS = 0.005  # of a processor: some are a little faster
PAUSE_SHARE, PAUSE_NS = 0.01, 10 * MS  # of steps: the system does something else
GARBAGE_EVERY, GARBAGE_NS = 10, 15 * MS
WARM_UP_STEPS, WARM_UP_TIMES = 3, 5.0
LINK_JITTER = 0.1
TRANSFERRED_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Slowness:
    """What is slow.

    Attributes:
        rank: that takes longer; -1 for none.
        sleep_ns: in every step of it.
        starved: times that it computes as long, varying.
        data_ns, garbage_ns: that it waits for data in every step, and collects garbage in most.
        links: source and destination -> times that a transfer takes.
    """

    rank: int = -1
    sleep_ns: float = 0.0
    starved: float = 1.0
    data_ns: float = 0.0
    garbage_ns: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """Attributes: steps of all ranks, transfers of the last steps, and when the last step ended, on the job's clock."""

    steps: Steps
    transfers: Transfers
    end_ns: int


def timed(
    layout: Layout, microbatches: int, count: int, slow: Slowness, skew_ns: Floats, random: np.random.Generator, *, told: int
) -> Timed:
    """Steps of a job from its start.

    Args:
        layout: of the job.
        microbatches: of a step.
        count: of steps.
        slow: what is not as with the others.
        skew_ns: ``[hosts]``, what is left of the difference of the clocks.
        random: of everything that varies.
        told: steps at the end whose transfers are told.
    """
    shape = (layout.pp, layout.dp, layout.tp)
    weight = np.ones(layout.pp)
    weight[0], weight[-1] = FIRST_STAGE, LAST_STAGE  # of one stage alone, that is no matter
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
            data[place] += slow.data_ns * random.uniform(0.5, 1.5) if slow.data_ns else 0.0
            garbage[place] += slow.garbage_ns * random.uniform(0.3, 1.7) if random.random() < 0.8 else 0.0
        forward[0] += pauses + garbage + data
        optimizer = OPTIMIZER_NS * weights * _varying(random, JITTER, shape)
        carried = TRANSFER_NS * times[:, None] * _varying(random, LINK_JITTER, (2, microbatches, layout.pp - 1, *shape[1:]))
        end = clock + _pipeline(forward.max(axis=3), backward.max(axis=3), carried.max(axis=4)) + float(optimizer.max())
        step = out[number]
        step["number"], step["data_ns"], step["garbage_ns"] = number + 1, data, garbage
        step["own_ns"] = forward.sum(axis=0) + backward.sum(axis=0) + optimizer
        step["begin_ns"], step["end_ns"] = clock + skews, end + skews
        if number >= count - told:
            transfers.append(_told(layout, carried, skews))
        clock = end
    return Timed(out.ravel(), np.concatenate([np.zeros(0, TRANSFER), *transfers]), int(clock))


def _varying(random: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = np.exp(np.float32(sigma) * random.standard_normal(shape, np.float32))
    return found


def _times(layout: Layout, slow: Slowness) -> Floats:
    """Factors of transfers: ``[direction, stage that is nearer to the first, replica, tensor]``."""
    out = np.ones((2, layout.pp - 1, layout.dp, layout.tp))
    for (source, destination), factor in slow.links.items():
        stage, replica, tensor = layout.place(min(source, destination))
        out[int(source > destination), stage, replica, tensor] = factor
    return out


def _pipeline(forward: Floats, backward: Floats, carried: Floats) -> float:
    """Nanoseconds until all replicas have made their last backward computation.

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


def _told(layout: Layout, carried: Floats, skews: Floats) -> Transfers:
    """Transfers as they are seen from two clocks."""
    ranks = np.arange(layout.world).reshape(skews.shape)
    out = np.zeros(carried.shape, TRANSFER)
    out["source"][0], out["destination"][0] = ranks[:-1], ranks[1:]
    out["source"][1], out["destination"][1] = ranks[1:], ranks[:-1]
    apart = skews[1:] - skews[:-1]
    out["ns"] = np.maximum(carried + np.stack([apart, -apart])[:, None], 0.0)
    out["bytes"] = TRANSFERRED_BYTES
    found: Transfers = out.ravel()
    return found
