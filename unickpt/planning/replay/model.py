"""A window of a job with its measured durations, and the step with other ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from unickpt.base.arrays import Floats
from unickpt.planning.replay.alike import OwnTimes, pieces_of
from unickpt.planning.replay.edits import Durations, measured
from unickpt.planning.replay.graph import Graph, graph_of
from unickpt.planning.replay.schedule import Levels, columns, schedule_of, simulate, step_times
from unickpt.planning.replay.trace import Trace, window_of

MOST_ELEMENTS = 1 << 24  # events times sets of durations that are replayed together


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """What replays of one window have in common.

    Attributes:
        graph, schedule: nodes and their order.
        pieces: own times.
        now: measured durations.
    """

    graph: Graph
    schedule: Levels
    pieces: OwnTimes
    now: Durations

    def means_s(self, changes: Iterable[Durations]) -> Iterator[float]:
        """Yield the mean step time of each set of durations; several are replayed together."""
        left, most = iter(changes), max(1, MOST_ELEMENTS // max(len(self.graph.events.rank), 1))
        while batch := list(islice(left, most)):
            yield from self.steps_s(batch).mean(axis=0).tolist()

    def steps_s(self, sets: Sequence[Durations]) -> Floats:
        """Return float64 ``[steps, sets]``: step times."""
        own, took = columns([each.own_ns for each in sets]), columns([each.took_ns for each in sets])
        return step_times(simulate(self.graph, self.schedule, own, took), self.graph.window.begin_ns) * 1e-9


def model_of(trace: Trace, steps: tuple[int, int] | None = None) -> ReplayModel:
    """Return the model of the steps from the first to the last of ``steps``; default: the newest ``trace.DEFAULT_STEPS``.

    Raises:
        FormatError: no step is known on all ranks, or the records contradict each other.
    """
    graph = graph_of(window_of(trace, steps))
    return ReplayModel(graph, schedule_of(graph), pieces_of(graph), measured(graph))
