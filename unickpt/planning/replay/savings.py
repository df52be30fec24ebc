"""Steps in which some ranks compute for less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.planning.replay import edits
from unickpt.planning.replay.alike import work_of_ranks
from unickpt.planning.replay.model import model_of
from unickpt.planning.replay.trace import Trace

_NS = 1e-9


class SavedTimes:
    """Replays a window of a job with less computation on some ranks. ``steps``: as of ``model_of``.

    Attributes:
        step_s: measured step, the mean over the window.
        error_s: distance between it and the replay with measured durations, at least the error of the clocks.
        work_s: seconds of a step in which each global rank computes.

    Raises:
        FormatError: no step is known on all ranks, or the records contradict each other.
    """

    def __init__(self, trace: Trace, steps: tuple[int, int] | None = None) -> None:
        self._model, self._ranks = model_of(trace, steps), trace.ranks
        self.work_s: Mapping[int, float] = work_of_ranks(self._model.graph, self._model.pieces)
        self.step_s = self._model.graph.window.step_ns * _NS
        self._replayed_s = next(self._model.means_s([self._model.now]))
        self.error_s = max(abs(self.step_s - self._replayed_s), trace.clock_error_ns * _NS)

    def steps_s(self, saved: Sequence[Mapping[int, float]]) -> list[float]:
        """Return the predicted step for each change: the measured step minus what the replay gains.

        Args:
            saved: seconds of a step that ranks compute less, by global rank; at most ``work_s``. Each part of the computation
                of a rank becomes shorter in the same proportion.

        Raises:
            FormatError: a rank has no records.
        """
        return [self.step_s - (self._replayed_s - each) for each in self._model.means_s(map(self._changed, saved))]

    def _changed(self, saved: Mapping[int, float]) -> edits.Durations:
        shares = np.zeros(len(self._ranks))
        for rank, seconds in saved.items():
            if rank not in self.work_s:
                raise FormatError(f"rank {rank} has no records here; the job has ranks {self._ranks[0]} to {self._ranks[-1]}")
            shares[np.searchsorted(self._ranks, rank)] = min(seconds / max(self.work_s[rank], _NS), 1.0)
        pieces = self._model.pieces
        return edits.with_own_times(self._model.now, pieces, pieces.own_ns - pieces.work_ns * shares[pieces.rank])
