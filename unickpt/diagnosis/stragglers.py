"""Ranks that keep the others waiting, step by step.

A rank's own time of a step is what it does not spend in calls that it waits for. Ranks that make the same calls in a step do
the same work, so that their own times can be compared, and a pipeline stage that has more to do is compared with its like
alone. (C4, arXiv 2406.04594, finds the rank that itself waits least; that is the same rank, without the need to know which
collectives are rings.)

What exceeds the middle of the peers counts if it does so in most steps, and by more than peers that are sound differ
from each other, than chance lets the middle of so many steps vary, and than is worth a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.middles import Floats, middles, middles_of_others
from unickpt.diagnosis.steps import Steps
from unickpt.diagnosis.verdicts import Syndrome, Verdict

SMALLEST_NS = 2_000_000.0  # excess that is worth a word, whatever the step takes
SHARE, OF_FEW = 0.005, 0.08  # of the step, and that much more divided by the number of peers, whose differences are not known
SPREADS = 8.0  # median deviations of the peers: 5.4 standard deviations, so that of 16,384 none is there by chance
CHANCES = 11.0  # median deviations of a step by the root of the number of steps: 6 standard errors of the middle of them
MIDDLE = 1.25  # times that much the median varies more than the mean, sqrt(pi / 2)
MOST = 0.6  # of the steps: so many times it has to be above


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
    found = [each for peers in _alike(steps) for each in _among(peers, last, fewest)]
    return [verdict for _, verdict in sorted(found, key=lambda each: -each[0])]


def _alike(steps: Steps) -> list[Steps]:
    """Steps of ranks that have made the same calls in most of them, of at least two ranks together."""
    if not len(steps):
        return []
    ranks, at = np.unique(steps["rank"], return_inverse=True)
    pairs, counts = np.unique(np.stack([at.astype(np.uint64), steps["calls"]], axis=1), axis=0, return_counts=True)
    pairs = pairs[np.lexsort((counts, pairs[:, 0]))]
    usual = pairs[np.searchsorted(pairs[:, 0], np.arange(len(ranks)), side="right") - 1, 1]  # calls of each rank
    _, kind, size = np.unique(usual, return_inverse=True, return_counts=True)
    kind = np.where(size[kind] > 1, kind, -1)
    order = np.argsort(kind[at], kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(kind[at][order])) + 1)
    return [steps[part] for part in parts if kind[at[part[0]]] >= 0]


def _among(steps: Steps, last: int, fewest: int) -> list[tuple[float, Verdict]]:
    """Ranks that are slow among those that make the same calls, each with its excess."""
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count > len(ranks) / 2][-last:]
    keep = np.isin(steps["number"], numbers)
    steps, row, column = steps[keep], row[keep], np.searchsorted(numbers, steps["number"][keep])

    def table(values: npt.NDArray[np.float64]) -> Floats:
        out = np.full((len(ranks), len(numbers)), np.nan)
        out[row, column] = values
        return out

    if len(numbers) < fewest:
        return []
    own = table(steps["own_ns"])
    excess = own - middles_of_others(own)
    middle = middles(excess)
    known = (~np.isnan(excess)).sum(axis=1)
    length = float(np.median(steps["end_ns"] - steps["begin_ns"]))
    judged = known >= fewest
    chance = float(np.nanmedian(np.abs(excess - middle[:, None]))) / np.sqrt(np.maximum(known, 1))
    spread = float(np.median(np.abs(middle[judged] - np.median(middle[judged])))) if judged.sum() > 2 else 0.0
    by_chance = MIDDLE * chance * (1 + 2 / np.sqrt(len(ranks)))  # of few ranks the spread is not known well
    always = np.sqrt(np.maximum(spread**2 - by_chance**2, 0.0))
    share = SHARE + OF_FEW / len(ranks)
    limits = np.maximum(np.maximum(SPREADS * always, CHANCES * chance), max(SMALLEST_NS, share * length))
    above = (excess > limits[:, None] / 2).sum(axis=1) / np.maximum(known, 1)
    slow = np.flatnonzero(judged & (middle > limits) & (above >= MOST))
    if not len(slow):
        return []
    data, garbage = middles(table(steps["data_ns"])[slow]), middles(table(steps["garbage_ns"])[slow])
    found = []
    for at, waits, pauses in zip(slow.tolist(), data.tolist(), garbage.tolist(), strict=True):
        more = float(middle[at])
        cause = "data" if waits > more / 2 else "garbage collection" if pauses > more / 2 else "compute"
        told = (
            f"rank {ranks[at]} takes {more / 1e6:.1f} ms longer than the {len(ranks) - 1} that make the same calls, in "
            f"{above[at]:.0%} of {known[at]} steps of {length / 1e6:.0f} ms; cause: {cause}"
        )
        since = int(steps["begin_ns"][row == at].min())
        found.append(
            (
                more,
                Verdict(
                    Syndrome.NON_COMMUNICATION_SLOW, (int(ranks[at]),), since, victims=len(ranks) - 1,
                    confidence=float(above[at]), evidence=(told,),
                ),
            )
        )  # fmt: skip
    return found
