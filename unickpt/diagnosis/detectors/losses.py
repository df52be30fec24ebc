"""Find time that is lost in some steps only, which no median shows.

- Garbage collections at different steps on different ranks: every step waits for somebody, and no rank is slower than another.
- A rank that is late in some steps, such as every seventh, and in the others not.

Both are judged over more steps than a rank that is always slow. Where sound ranks are late by chance, all are equally often.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.medians import medians_of_others, row_medians
from unickpt.diagnosis.detectors.stragglers import at_least
from unickpt.diagnosis.detectors.verdicts import Cause, LongStepsNowAndThen, RotatingPauses, Syndrome, Verdict
from unickpt.diagnosis.snapshot.steps import StepRows

OVER = 64  # newest steps that are compared
FEWEST_STEPS = 24  # of them that must be known
LOST = 0.05  # smallest loss to report, as a share of the time
COLLECTIONS = 3  # smallest number of steps in which each of at least two ranks collects
FALSE_ALARMS = 1e-4  # probability of a false alarm by chance, over all ranks of a job
LATE_OF_STEP = 0.5  # smallest excess of a late step, as a share of the median step
ALONE = 0.8  # share of the late steps of the job that are those of the rank
WARM_UP = 5


def losses(steps: StepRows) -> list[Verdict]:
    """Return verdicts on ranks that are late now and then; otherwise on garbage collections in turn."""
    ranks, table = _tables(steps[steps["number"] > WARM_UP])
    if len(ranks) < 2 or table.shape[2] < FEWEST_STEPS:
        return []
    return _now_and_then(ranks, table) or _in_turn(ranks, table)


_COLUMNS = ("begin_ns", "end_ns", "own_ns", "garbage_ns", "data_ns", "long")


def _tables(steps: StepRows) -> tuple[npt.NDArray[np.int32], Floats]:
    """Return the ranks, and for the newest steps that all of them have ``[column, rank, step]``."""
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count == len(ranks)][-OVER:]
    keep = np.isin(steps["number"], numbers)
    table = np.full((len(_COLUMNS), len(ranks), len(numbers)), np.nan)
    at = np.searchsorted(numbers, steps["number"][keep])
    for place, name in enumerate(_COLUMNS):
        table[place, row[keep], at] = steps[name][keep]
    return ranks, table


def _now_and_then(ranks: npt.NDArray[np.int32], table: Floats) -> list[Verdict]:
    begin, end, own, garbage, data, long = table
    length = np.median(end - begin, axis=0)
    usual = float(np.median(length))
    more = own - row_medians(own)[:, None]  # than the rank itself usually takes: stages of a pipeline differ
    excess = np.where(long.any(axis=0), 0.0, more - medians_of_others(more))  # saves and evaluations are not judged
    late = excess > LATE_OF_STEP * usual
    hits = late.sum(axis=1)
    at = int(np.argmax(hits))
    slow, total = int(hits[at]), int(hits.sum())
    lost = float(excess[at][late[at]].sum())
    if slow < 2 or slow > late.shape[1] / 2 or slow < ALONE * total or lost < LOST * float(length.sum()):
        return []
    if len(ranks) * at_least(slow, total, 1 / len(ranks)) > FALSE_ALARMS:
        return []
    where = np.flatnonzero(late[at])
    distances = np.bincount(np.diff(where))
    every = int(distances.argmax()) if distances.max() * 2 >= slow else 0
    cause = next(
        (cause for cause, column in ((Cause.DATA, data), (Cause.GARBAGE, garbage)) if _explains(column[at], late[at], lost)),
        Cause.COMPUTE,
    )
    evidence = LongStepsNowAndThen(
        float(np.median(excess[at][late[at]])), lost / late.shape[1], usual, slow, late.shape[1], every
    )
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, (int(ranks[at]),), int(begin[at, where[0]]), victims=len(ranks) - 1,
            confidence=slow / total, cause=cause, evidence=(evidence,),
        )
    ]  # fmt: skip


def _explains(times: Floats, late: npt.NDArray[np.bool_], lost: float) -> bool:
    """Return whether a part of a rank's own times, beyond the usual, is more than half of what late steps have cost."""
    return float((times - np.median(times))[late].sum()) > lost / 2


def _in_turn(ranks: npt.NDArray[np.int32], table: Floats) -> list[Verdict]:
    """Collections at the same steps would cost those of the rank with the longest ones; the rest is lost.

    A collection costs what the rank's own time exceeds the usual: a device that has work to do hides it.
    """
    begin, end, own, garbage, _, long = table
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
