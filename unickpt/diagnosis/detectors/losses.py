"""Find time that no comparison of medians between ranks shows.

- Garbage collections at different steps on different ranks: every step waits for somebody, and no rank is slower than another.
- A rank, or all ranks of a host, that are late in some steps, such as every seventh, and in the others not.

They are judged by the share of the time that they cost, over more steps than a rank that is always slow. Where sound ranks are
late by chance, all are equally often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.medians import medians_of_others, row_medians
from unickpt.diagnosis.detectors.observations import LongStepsNowAndThen, RotatingPauses
from unickpt.diagnosis.detectors.step_tables import step_tables
from unickpt.diagnosis.detectors.stragglers import at_least
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.steps import StepRows

OVER, LONGER = 64, 256  # newest steps that are compared: first, and where nothing is found in them
FEWEST_STEPS = 24  # of them that must be known
LOST = 0.05  # smallest loss to report, as a share of the time
COLLECTIONS = 3  # smallest number of steps in which each of at least two ranks collects
FALSE_ALARMS = 1e-4  # probability of a false alarm by chance, over all ranks of a job
LATE_OF_STEP = 0.5  # smallest excess of a late step, as a share of the median step
ALONE = 0.8  # share of the late steps of the job that are those of the rank
REGULAR = 4  # smallest number of late steps at equal distances


def losses(steps: StepRows, hosts: Mapping[int, str] = MappingProxyType({})) -> list[Verdict]:
    """Return verdicts on ranks that are late now and then; otherwise on garbage collections in turn.

    Args:
        steps: steps of every rank, in any order.
        hosts: host of each rank; empty if unknown. All ranks of a host may be late together.
    """
    for over in (OVER, LONGER):
        ranks, table, _ = step_tables(steps, over)
        if len(ranks) < 2 or table.shape[2] < FEWEST_STEPS:
            return []
        each = [(rank,) for rank in ranks.tolist()]
        together = _by_host(ranks.tolist(), hosts)
        found = _now_and_then(ranks, table, each) or (_now_and_then(ranks, table, together) if len(together) > 1 else [])
        found = found or (_in_turn(ranks, table) if over == OVER else [])
        if found or table.shape[2] < over:
            return found
    return []


def _by_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Return the ranks of each host; empty if a host is unknown."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in hosts:
            return []
        found.setdefault(hosts[rank], []).append(rank)
    return [tuple(members) for members in found.values()]


def _now_and_then(ranks: npt.NDArray[np.int32], table: Floats, units: Sequence[tuple[int, ...]]) -> list[Verdict]:
    """Return a verdict on the unit, a rank or the ranks of a host, to which nearly all late steps belong."""
    begin, end, own, garbage, data, long, _ = table
    length = np.median(end - begin, axis=0)
    usual = float(np.median(length))
    rows = [np.searchsorted(ranks, unit) for unit in units]
    more = own - row_medians(own)[:, None]  # than the rank itself usually takes: stages of a pipeline differ
    more = np.array([np.median(more[row], axis=0) for row in rows])
    excess = more - np.maximum(medians_of_others(more), 0.0)  # nobody is late where the others are faster than they usually are
    excess = np.where(long.any(axis=0), 0.0, excess)  # saves and evaluations are not judged
    late = excess > LATE_OF_STEP * usual
    hits = late.sum(axis=1)
    at = int(np.argmax(hits))
    slow, total = int(hits[at]), int(hits.sum())
    lost = float(excess[at][late[at]].sum())
    if slow < 2 or slow > late.shape[1] / 2 or slow < ALONE * total or lost < LOST * float(length.sum()):
        return []
    where = np.flatnonzero(late[at])
    if len(units) * at_least(slow, total, 1 / len(units)) * _regular(where, late.shape[1]) > FALSE_ALARMS / 2:
        return []
    distances = np.bincount(np.diff(where))
    every = int(distances.argmax()) if distances.max() * 2 >= slow else 0
    first = int(rows[at][0])
    cause = next(
        (cause for cause, column in ((Cause.DATA, data), (Cause.GARBAGE, garbage)) if _explains(column[first], late[at], lost)),
        Cause.COMPUTE,
    )
    evidence = LongStepsNowAndThen(
        float(np.median(excess[at][late[at]])), lost / late.shape[1], usual, slow, late.shape[1], every
    )
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, units[at], int(begin[first, where[0]]), victims=len(ranks) - len(units[at]),
            confidence=slow / total, cause=cause, evidence=(evidence,),
        )
    ]  # fmt: skip


def _regular(where: npt.NDArray[np.intp], steps: int) -> float:
    """Return the probability of late steps at equal distances by chance; 1 for other distances, or for few steps."""
    if len(where) < REGULAR or len(set(np.diff(where).tolist())) > 1:
        return 1.0
    patterns = steps * steps / (2 * (len(where) - 1))  # of so many steps at equal distances
    return float(min(1.0, patterns / math.comb(steps, len(where))))


def _explains(times: Floats, late: npt.NDArray[np.bool_], lost: float) -> bool:
    """Return whether a part of a rank's own times, beyond the usual, is more than half of what late steps have cost."""
    return float((times - np.median(times))[late].sum()) > lost / 2


def _in_turn(ranks: npt.NDArray[np.int32], table: Floats) -> list[Verdict]:
    """Collections at the same steps would cost those of the rank with the longest ones; the rest is lost.

    A collection costs what the rank's own time exceeds the usual: a device that has work to do hides it.
    """
    begin, end, own, garbage, _, long, _ = table
    more = np.maximum(own - row_medians(own)[:, None], 0.0)
    garbage = np.where(long.any(axis=0), 0.0, np.minimum(garbage, more))
    lost = float(garbage.max(axis=0).sum() - garbage.sum(axis=1).max())
    length = np.median(end - begin, axis=0)
    often = (garbage > 0).sum(axis=1) >= COLLECTIONS
    if often.sum() < 2 or lost < LOST * float(length.sum()):
        return []
    count = garbage.shape[1]
    evidence = RotatingPauses(lost / count, float(length.mean()), count, int((garbage.max(axis=0) > 0).sum()))
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, tuple(ranks[often].tolist()), int(begin.min()), victims=len(ranks),
            cause=Cause.GARBAGE, evidence=(evidence,),
        )
    ]  # fmt: skip
