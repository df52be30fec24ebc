"""Steps in which some ranks compute for less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.planning.replay import edits
from unickpt.planning.replay.alike import pieces_of
from unickpt.planning.replay.graph import graph_of
from unickpt.planning.replay.price import MOST_ELEMENTS
from unickpt.planning.replay.schedule import columns, schedule_of, simulate, step_times
from unickpt.planning.replay.trace import Trace, window_of

_NS = 1e-9


class SavedTimes:
    """Replays a window of a job with less computation on some ranks.

    Args:
        trace: records of the job.
        steps: first and last step; default: the newest ``trace.DEFAULT_STEPS``.

    Attributes:
        step_s: measured step, the mean over the window.
        error_s: distance between it and the replay with measured durations, at least the error of the clocks.
        work_s: seconds of a step in which each global rank computes.

    Raises:
        FormatError: no step is known on all ranks, or the records contradict each other.
    """

    def __init__(self, trace: Trace, steps: tuple[int, int] | None = None) -> None:
        window = window_of(trace, steps)
        self._graph = graph_of(window)
        self._schedule, self._pieces = schedule_of(self._graph), pieces_of(self._graph)
        self._now = edits.measured(self._graph)
        self._ranks = trace.ranks
        work = np.bincount(self._pieces.rank, self._pieces.work_ns, minlength=len(trace.ranks)) * _NS / len(window.steps)
        self.work_s: Mapping[int, float] = dict(zip(trace.ranks.tolist(), work.tolist(), strict=True))
        self.step_s = window.step_ns * _NS
        self._replayed_s = self._means([self._now])[0]
        self.error_s = max(abs(self.step_s - self._replayed_s), trace.clock_error_ns * _NS)

    def steps_s(self, saved: Sequence[Mapping[int, float]]) -> list[float]:
        """Return the predicted step for each change: the measured step minus what the replay gains.

        Args:
            saved: seconds of a step that ranks compute less, by global rank; at most ``work_s``. Each part of the computation
                of a rank becomes shorter in the same proportion.

        Raises:
            FormatError: a rank has no records.
        """
        most = max(1, MOST_ELEMENTS // max(len(self._graph.events.rank), 1))
        found: list[float] = []
        for begin in range(0, len(saved), most):
            found += self._means([self._changed(each) for each in saved[begin : begin + most]])
        return [self.step_s - (self._replayed_s - each) for each in found]

    def _changed(self, saved: Mapping[int, float]) -> edits.Durations:
        shares = np.zeros(len(self._ranks))
        for rank, seconds in saved.items():
            if rank not in self.work_s:
                raise FormatError(f"rank {rank} has no records here; the job has ranks {self._ranks[0]} to {self._ranks[-1]}")
            shares[np.searchsorted(self._ranks, rank)] = min(seconds / max(self.work_s[rank], _NS), 1.0)
        pieces = self._pieces
        return edits.with_own_times(self._now, pieces, pieces.own_ns - pieces.work_ns * shares[pieces.rank])

    def _means(self, sets: list[edits.Durations]) -> list[float]:
        own, took = columns([each.own_ns for each in sets]), columns([each.took_ns for each in sets])
        ends = simulate(self._graph, self._schedule, own, took)
        found: list[float] = (step_times(ends, self._graph.window.begin_ns).mean(axis=0) * _NS).tolist()
        return found
