"""What the job would gain without the ranks of a slow verdict, asked rarely from a function that is given from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unickpt.base.errors import UnickptError
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.snapshot.snapshot import Snapshot

# snapshot, ranks at fault, links at fault -> fraction of a step, 0 to 1. It raises UnickptError if the snapshot does not tell.
PredictGain = Callable[[Snapshot, Sequence[int], Sequence[tuple[int, int]]], float]
ASK_S = 10.0  # between two predictions for one verdict
SHARE = 50.0  # predictions take at most one part of so many of the time


class Gains:
    """Keeps the newest prediction of each verdict.

    Args:
        predict: function that predicts; None: nothing is predicted.
        clock: seconds.
    """

    def __init__(self, predict: PredictGain | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._predict, self._clock = predict, clock
        self._known: dict[str, tuple[float, float | None]] = {}  # time of the prediction, and its result, by key of the verdict
        self._free_s = 0.0  # no prediction before this time

    def of(self, verdict: Verdict, snapshot: Snapshot) -> float | None:
        """Return the predicted gain of taking out the ranks or the links of a verdict; None if it is unknown."""
        begin = self._clock()
        asked_s, gain = self._known.get(verdict.key, (float("-inf"), None))
        if self._predict is None or begin < max(asked_s + ASK_S, self._free_s):
            return gain
        try:
            gain = self._predict(snapshot, verdict.ranks, verdict.links)
        except UnickptError:
            gain = None
        end = self._clock()
        self._known = {key: each for key, each in self._known.items() if begin - each[0] < SHARE * ASK_S}
        self._known[verdict.key] = (end, gain)
        self._free_s = end + SHARE * (end - begin)
        return gain
