"""Graphs of handmade traces: what depends on what, and which ranks are alike."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from tests.support.replay_traces import Made, made_trace
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.alike import like_others, pieces_of
from unickpt.planning.replay.edits import measured
from unickpt.planning.replay.graph import graph_of
from unickpt.planning.replay.price import Questions, analyse
from unickpt.planning.replay.schedule import columns, schedule_of, simulate
from unickpt.planning.replay.trace import TraceGroup, window_of
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace


def test_a_transfer_begins_after_the_one_before_it_in_its_communicator() -> None:
    """Both ranks call twice at once, and wait for the second transfer only: 10 ns, then 10 ns more."""
    calls = [
        Made(rank, Op.ALL_REDUCE, 0, seq, at, 4, end)
        for rank in (0, 1)
        for seq, at, end in ((1, 1, 11), (2, 2, 21))
    ]  # fmt: skip
    graph = graph_of(window_of(made_trace([TraceGroup("data parallel", (0, 1))], calls, [[25], [25]])))
    assert graph.transfers.took_ns.tolist() == [10, 10]
    now = measured(graph)
    took = now.took_ns - [7, 0]
    ends = simulate(graph, schedule_of(graph), columns([now.own_ns] * 2), columns([now.took_ns, took]))
    assert ends[:, 0].tolist() == [[25, 18], [25, 18]]


def test_ranks_of_other_stages_are_no_peers() -> None:
    """Two stages of two ranks make the same calls; the ranks of the second stage compute twice as long."""
    groups = [TraceGroup("data parallel", (0, 1)), TraceGroup("data parallel", (2, 3))]
    calls = [Made(rank, Op.ALL_REDUCE, rank // 2, 1, own, own, own + 5) for rank, own in enumerate((10, 10, 20, 20))]
    places = [{"pp": rank // 2} for rank in range(4)]
    found = analyse(made_trace(groups, calls, [[15], [15], [25], [25]], places=places), questions=Questions(like_peers=(2, 3)))
    assert found.by_rank == {0: 0, 1: 0, 2: 0, 3: 0}
    assert [each.gain_s for each in found.answers] == [0, 0]
    assert found.ideal_s == pytest.approx(20e-9)
    alike = analyse(made_trace(groups, calls, [[15], [15], [25], [25]]))
    assert alike.ideal_s == pytest.approx(15e-9)  # without stages, the same calls make ranks peers


@pytest.mark.parametrize("values", [[1, 2, 3, 100], [7, 5, 5, 5], [1, 2, 9], [3, 8], [4]])
def test_a_rank_is_compared_with_the_median_of_the_others(values: list[float]) -> None:
    pieces = pieces_of(graph_of(window_of(simulated_trace(ParallelLayout(1, 1, len(values)), 1, 1))))
    found = like_others(pieces, np.array(values, np.float64)[pieces.rank])
    for rank in range(len(values)):
        others = values[:rank] + values[rank + 1 :]
        expected = statistics.median(others) if others else float("nan")
        assert found[pieces.rank == rank].tolist() == pytest.approx([expected] * int((pieces.rank == rank).sum()), nan_ok=True)


@pytest.mark.parametrize(("every", "count", "first"), [(0, 85, 66), (30, 85, 30), (7, 85, 66), (0, 12, 1)])
def test_the_default_window_holds_slow_steps_as_often_as_they_come(every: int, count: int, first: int) -> None:
    """Steps of 10 ms, of which every so many takes 200 ms longer. ``first``: the window begins there or before."""
    took = [10 + 200 * (every > 0 and number % every == 0) for number in range(1, count + 1)]
    ends = np.cumsum(took).tolist()
    steps = window_of(made_trace([TraceGroup("", (0, 1))], [], [ends, ends])).steps
    assert steps[0] <= first
    assert len(steps) <= 64
    assert abs(np.mean(took[steps[0] - 1 :]) / np.mean(took[-64:]) - 1) <= 0.05 or len(steps) == 20
    if not every:
        assert steps.tolist() == list(range(first, count + 1))
