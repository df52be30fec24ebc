"""Ranks that keep the others waiting, step by step.

A rank's own time of a step is what it does not spend in calls that it waits for. Ranks that make the same calls in a step do
the same work, so that their own times can be compared, and a pipeline stage that has more to do is compared with its like
alone. (C4, arXiv 2406.04594, finds the rank that itself waits least; that is the same rank, without the need to know which
collectives are rings.)

What exceeds the middle of the peers counts if it does so in most steps, and more often than pauses that all have now and then
would make it; and by more than peers that are sound differ from each other, than chance lets the middle of so many steps
vary, and than is worth a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.middles import Floats, middles, middles_of_others
from unickpt.diagnosis.steps import Steps
from unickpt.diagnosis.verdicts import Syndrome, Verdict

SMALLEST_NS = 2_000_000.0  # excess that is worth a word, whatever the step takes
SHARE, OF_FEW = 0.005, 0.2  # of the step, and that much more divided by the number of peers, whose differences are not known
EXPLAINED = 0.02  # instead of the latter, where a wait for data or a pause was seen that makes up half of the excess
FALSE_ALARMS = 1e-4  # that chance alone may give, of all ranks of a job together
MOST = 0.6  # of the steps: so many times it has to be above half of what is a limit to the middle of them
SIGMA = 1.4826  # standard deviations, of the median deviation
FEW = 8  # ranks of a job: what fewer differ by cannot be told from what one of them does
MIDDLE = 1.25  # what the median of n varies by, of what one varies by and the root of n


def stragglers(steps: Steps, *, last: int = 20, fewest: int = 16, warm_up: int = 5) -> list[Verdict]:
    """Ranks whose own time exceeds that of their peers, most of the time; the slowest first.

    Args:
        steps: of every rank, in any order.
        last: steps to look at, the newest that most peers have.
        fewest: steps that it takes to say anything of a rank.
        warm_up: the first steps of a job, which are not looked at.
    """
    steps = steps[steps["number"] > warm_up]
    steps = steps[np.lexsort((steps["number"], steps["rank"]))]
    left = np.searchsorted(steps["rank"], steps["rank"], side="right") - np.arange(len(steps))
    steps = steps[left <= last]
    classes = [_compared(peers, last, fewest) for peers in _alike(steps)]
    classes = [each for each in classes if each.judged.any()]
    always, judged = _always(classes), sum(int(each.judged.sum()) for each in classes)
    found = [slow for each in classes for slow in _slow(each, always, judged)]
    return [verdict for _, verdict in sorted(found, key=lambda each: -each[0])]


def _alike(steps: Steps) -> list[Steps]:
    """Steps of ranks that have made the same calls in most of them, of at least two ranks together."""
    if not len(steps):
        return []
    ranks, at = np.unique(steps["rank"], return_inverse=True)
    order = np.lexsort((steps["calls"], at))
    first = np.flatnonzero(np.append(True, (np.diff(at[order]) != 0) | (np.diff(steps["calls"][order]) != 0)))
    counts = np.diff(np.append(first, len(steps)))
    first = order[first][np.lexsort((counts, at[order[first]]))]  # of each rank, the calls that are made most come last
    usual = steps["calls"][first[np.searchsorted(at[first], np.arange(len(ranks)), side="right") - 1]]
    _, kind, size = np.unique(usual, return_inverse=True, return_counts=True)
    order = np.flatnonzero(size[kind[at]] > 1)
    order = order[np.argsort(kind[at[order]], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(kind[at[order]])) + 1)
    return [steps[part] for part in parts if len(part)]


@dataclass(frozen=True, slots=True)
class _Compared:
    """Ranks that make the same calls, ``[n]``, in steps that most of them have, ``[m]``.

    Attributes:
        steps: of all of them, in no order.
        ranks: their numbers.
        row: of each of the steps, the position of its rank.
        excess: ``[n, m]`` nanoseconds of own time above the middle of the others; NaN for steps of which nothing is known.
        middle: ``[n]``, of the excess.
        known: ``[n]``, steps of each.
        judged: ``[n]``, whether these are enough.
        explained: ``[n]`` nanoseconds, of waits for data and garbage collections above the middle of the others.
        length_ns: of a step.
        own_ns: of a step of most ranks.
    """

    steps: Steps
    ranks: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    excess: Floats
    middle: Floats
    known: npt.NDArray[np.int64]
    judged: npt.NDArray[np.bool_]
    explained: Floats
    length_ns: float
    own_ns: float


def _compared(steps: Steps, last: int, fewest: int) -> _Compared:
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count > len(ranks) / 2][-last:]
    keep = np.isin(steps["number"], numbers)
    steps, row = steps[keep], row[keep]
    own, seen = np.full((2, len(ranks), len(numbers)), np.nan)
    at = np.searchsorted(numbers, steps["number"])
    own[row, at], seen[row, at] = steps["own_ns"], steps["data_ns"] + steps["garbage_ns"]
    excess = own - middles_of_others(own)
    known = (~np.isnan(excess)).sum(axis=1)
    if not len(steps):
        return _Compared(steps, ranks, row, excess, np.zeros(len(ranks)), known, known < 0, np.zeros(len(ranks)), 0.0, 0.0)
    length = float(np.median(steps["end_ns"] - steps["begin_ns"]))
    return _Compared(
        steps, ranks, row, excess, middles(excess), known, known >= fewest, middles(seen - middles_of_others(seen)), length,
        float(np.median(steps["own_ns"])),
    )  # fmt: skip


def _chance(peers: _Compared) -> Floats:
    """Nanoseconds, ``[n]``: the median deviation of the middle of as many steps, if every step varies for itself."""
    one = float(np.nanmedian(np.abs(peers.excess - peers.middle[:, None])))
    found: Floats = MIDDLE * one / np.sqrt(np.maximum(peers.known, 1))
    return found


def _always(classes: Sequence[_Compared]) -> float:
    """What sound ranks always differ by, beyond chance: the median deviation, as a share of their own time.

    It is taken from all ranks of the job, whatever they do, as their processors are of one kind; of few ranks, a little more.
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
    """Ranks that are slow among those that make the same calls, each with its excess.

    Args:
        peers: these ranks.
        always: what sound ranks differ by, as a share of their own time.
        judged: how many ranks of the job are looked at.
    """
    deviations = SIGMA * np.sqrt(2 * np.log(max(judged, 1) / FALSE_ALARMS))
    of_few = np.where(peers.explained > peers.middle / 2, min(EXPLAINED, OF_FEW / len(peers.ranks)), OF_FEW / len(peers.ranks))
    smallest = np.maximum(SMALLEST_NS, (SHARE + of_few) * peers.length_ns)
    limits = np.maximum(deviations * np.hypot(always * peers.own_ns, _chance(peers)), smallest)
    above = (peers.excess > limits[:, None] / 2).sum(axis=1) / np.maximum(peers.known, 1)
    found = []
    for at in np.flatnonzero(peers.judged & (peers.middle > limits) & (above >= MOST)).tolist():
        often = (peers.excess > peers.middle[at] / 2).sum(axis=1)  # how often everybody takes about as long as this one
        others_share = (often.sum() - often[at]) / (peers.known.sum() - peers.known[at])
        if judged * _at_least(int(often[at]), int(peers.known[at]), float(others_share)) > FALSE_ALARMS:
            continue
        own = peers.steps[peers.row == at]
        more, rank, others = float(peers.middle[at]), int(peers.ranks[at]), len(peers.ranks) - 1
        waits, pauses = float(np.median(own["data_ns"])), float(np.median(own["garbage_ns"]))
        cause = "data" if waits > more / 2 else "garbage collection" if pauses > more / 2 else "compute"
        told = (
            f"rank {rank} takes {more / 1e6:.1f} ms longer than the {others} that make the same calls, in {above[at]:.0%} of "
            f"{peers.known[at]} steps of {peers.length_ns / 1e6:.0f} ms; cause: {cause}"
        )
        verdict = Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, (rank,), int(own["begin_ns"].min()), victims=others,
            confidence=float(above[at]), cause=cause, evidence=(told,),
        )  # fmt: skip
        found.append((more, verdict))
    return found


def _at_least(count: int, of: int, share: float) -> float:
    """Probability that of so many, each with a share of being hit, at least ``count`` are."""
    return sum(math.comb(of, hit) * share**hit * (1 - share) ** (of - hit) for hit in range(count, of + 1))
