"""Find ranks whose steps take longer than those of their peers.

A rank's own time in a step is the time that it does not wait in calls. Ranks that make the same calls in a step do the same
work, so their own times are comparable; a pipeline stage with more work is compared with its own kind only. (C4, arXiv
2406.04594, looks for the rank that waits least. That is the same rank, but needs to know which collectives are rings.)

A rank is slow if its own time exceeds the median of its peers in most steps, and more often than the pauses that all ranks
have would explain. The excess must be larger than the usual differences between peers, larger than what chance gives for the
median of that many steps, and large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.medians import medians_of_others, row_medians
from unickpt.diagnosis.detectors.observations import LongSteps
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.steps import StepRows

SMALLEST_NS = 2_000_000.0  # smallest excess to report, whatever the step takes
SHARE, OF_FEW = 0.005, 0.2  # smallest excess as a share of the step, plus OF_FEW / number of peers
EXPLAINED = 0.02  # replaces OF_FEW where a recorded wait for data or pause explains half of the excess
FALSE_ALARMS = 1e-4  # probability of a false alarm by chance, over all ranks of a job
MOST = 0.6  # share of the steps that must exceed half of the limit
SIGMA = 1.4826  # standard deviation / median absolute deviation
FEW = 8  # ranks below which usual differences cannot be estimated
MIDDLE = 1.25  # standard error of a median of n, times sqrt(n) / sigma


def stragglers(steps: StepRows, *, last: int = 20, fewest: int = 16, warm_up: int = 5) -> list[Verdict]:
    """Return verdicts on ranks whose own time exceeds that of their peers in most steps, the slowest rank first.

    Args:
        steps: steps of every rank, in any order.
        last: number of newest steps to compare.
        fewest: smallest number of steps of a rank that is judged.
        warm_up: number of first steps of a job to skip.
    """
    classes = [each for each in _classes(steps, last, fewest, warm_up) if each.judged.any()]
    always, judged = _always(classes), sum(int(each.judged.sum()) for each in classes)
    found = [slow for each in classes for slow in _slow(each, always, judged)]
    return [verdict for _, verdict in sorted(found, key=lambda each: -each[0])]


def peers_known(steps: StepRows, *, last: int = 20, fewest: int = 16, warm_up: int = 5) -> dict[int, bool]:
    """Return for each rank with peers whether ``stragglers``, with the same arguments, judges it."""
    classes = _classes(steps, last, fewest, warm_up)
    return {rank: judged for each in classes for rank, judged in zip(each.ranks.tolist(), each.judged.tolist(), strict=True)}


def _classes(steps: StepRows, last: int, fewest: int, warm_up: int) -> list[_Compared]:
    steps = steps[steps["number"] > warm_up]
    steps = steps[np.lexsort((steps["number"], steps["rank"]))]
    left = np.searchsorted(steps["rank"], steps["rank"], side="right") - np.arange(len(steps))
    return [_compared(peers, last, fewest) for peers in _alike(steps[left <= last])]


def _alike(steps: StepRows) -> list[StepRows]:
    """Split steps by the calls that their ranks usually make; classes of a single rank are left out."""
    if not len(steps):
        return []
    ranks, at = np.unique(steps["rank"], return_inverse=True)
    order = np.lexsort((steps["calls"], at))
    first = np.flatnonzero(np.append(True, (np.diff(at[order]) != 0) | (np.diff(steps["calls"][order]) != 0)))
    counts = np.diff(np.append(first, len(steps)))
    first = order[first][np.lexsort((counts, at[order[first]]))]  # per rank, the most frequent calls last
    usual = steps["calls"][first[np.searchsorted(at[first], np.arange(len(ranks)), side="right") - 1]]
    _, kind, size = np.unique(usual, return_inverse=True, return_counts=True)
    order = np.flatnonzero(size[kind[at]] > 1)
    order = order[np.argsort(kind[at[order]], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(kind[at[order]])) + 1)
    return [steps[part] for part in parts if len(part)]


@dataclass(frozen=True, slots=True)
class _Compared:
    """``n`` ranks that make the same calls, in ``m`` steps that most of them have.

    Attributes:
        steps: steps of these ranks, in any order.
        ranks: global ranks, ``[n]``.
        row: position in ``ranks`` for each of ``steps``.
        excess: ``[n, m]`` nanoseconds of own time above the median of the other ranks; NaN where unknown.
        middle: ``[n]`` nanoseconds, median excess.
        known: ``[n]``, number of known steps.
        judged: ``[n]``, whether enough steps are known.
        explained: ``[n]`` nanoseconds of waits for data and garbage collections above the median of the other ranks.
        length_ns: median duration of a step.
        own_ns: median own time of a step.
    """

    steps: StepRows
    ranks: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    excess: Floats
    middle: Floats
    known: npt.NDArray[np.int64]
    judged: npt.NDArray[np.bool_]
    explained: Floats
    length_ns: float
    own_ns: float


def _compared(steps: StepRows, last: int, fewest: int) -> _Compared:
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count > len(ranks) / 2][-last:]
    keep = np.isin(steps["number"], numbers)
    steps, row = steps[keep], row[keep]
    own, seen = np.full((2, len(ranks), len(numbers)), np.nan)
    at = np.searchsorted(numbers, steps["number"])
    own[row, at], seen[row, at] = steps["own_ns"], steps["data_ns"] + steps["garbage_ns"]
    excess = own - medians_of_others(own)
    known = (~np.isnan(excess)).sum(axis=1)
    if not len(steps):
        return _Compared(steps, ranks, row, excess, np.zeros(len(ranks)), known, known < 0, np.zeros(len(ranks)), 0.0, 0.0)
    length = float(np.median(steps["end_ns"] - steps["begin_ns"]))
    return _Compared(
        steps, ranks, row, excess, row_medians(excess), known, known >= fewest,
        row_medians(seen - medians_of_others(seen)), length, float(np.median(steps["own_ns"])),
    )  # fmt: skip


def _chance(peers: _Compared) -> Floats:
    """Return ``[n]`` nanoseconds: deviation of the median excess that independent steps would give."""
    one = float(np.nanmedian(np.abs(peers.excess - peers.middle[:, None])))
    found: Floats = MIDDLE * one / np.sqrt(np.maximum(peers.known, 1))
    return found


def _always(classes: Sequence[_Compared]) -> float:
    """Return the lasting difference between sound ranks beyond chance: median absolute deviation as a share of their own time.

    Estimated from all ranks of the job, since their processors are of one kind; slightly enlarged for few ranks.
    """
    judged = sum(int(each.judged.sum()) for each in classes)
    if judged < FEW:
        return 0.0
    middle = np.concatenate([(each.middle / max(each.own_ns, 1.0))[each.judged] for each in classes])
    chance = np.concatenate([(_chance(each) / max(each.own_ns, 1.0))[each.judged] for each in classes])
    spread = float(np.median(np.abs(middle - np.median(middle))))
    by_chance = float(np.median(chance)) * (1 + 2 / np.sqrt(judged))
    return float(np.sqrt(max(spread**2 - by_chance**2, 0.0)) * (1 + 1 / np.sqrt(judged)))


def _slow(peers: _Compared, always: float, judged: int) -> list[tuple[float, Verdict]]:
    """Return verdicts on the slow ranks of one class, each with its excess in nanoseconds; ``judged`` are those of the job."""
    deviations = SIGMA * np.sqrt(2 * np.log(max(judged, 1) / FALSE_ALARMS))
    of_few = np.where(peers.explained > peers.middle / 2, min(EXPLAINED, OF_FEW / len(peers.ranks)), OF_FEW / len(peers.ranks))
    smallest = np.maximum(SMALLEST_NS, (SHARE + of_few) * peers.length_ns)
    limits = np.maximum(deviations * np.hypot(always * peers.own_ns, _chance(peers)), smallest)
    above = (peers.excess > limits[:, None] / 2).sum(axis=1) / np.maximum(peers.known, 1)
    found = []
    for at in np.flatnonzero(peers.judged & (peers.middle > limits) & (above >= MOST)).tolist():
        often = (peers.excess > peers.middle[at] / 2).sum(axis=1)  # how often each rank takes about as long as this one
        others_share = (often.sum() - often[at]) / (peers.known.sum() - peers.known[at])
        if judged * at_least(int(often[at]), int(peers.known[at]), float(others_share)) > FALSE_ALARMS:
            continue
        own = peers.steps[peers.row == at]
        more, rank, others = float(peers.middle[at]), int(peers.ranks[at]), len(peers.ranks) - 1
        waits, pauses = float(np.median(own["data_ns"])), float(np.median(own["garbage_ns"]))
        cause = Cause.DATA if waits > more / 2 else Cause.GARBAGE if pauses > more / 2 else Cause.COMPUTE
        evidence = LongSteps(more, peers.length_ns, others, int(peers.known[at]), float(above[at]))
        verdict = Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, (rank,), int(own["begin_ns"].min()), victims=others,
            confidence=float(above[at]), cause=cause, evidence=(evidence,),
        )  # fmt: skip
        found.append((more, verdict))
    return found


def at_least(count: int, of: int, share: float) -> float:
    """Return the probability of at least ``count`` hits in ``of`` independent trials with probability ``share``."""
    return sum(math.comb(of, hit) * share**hit * (1 - share) ** (of - hit) for hit in range(count, of + 1))
