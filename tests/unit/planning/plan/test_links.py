"""Fitted times of transfers against those that made the records."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.replay_traces import Made, made_trace
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.plan.links import LinkCosts, fitted, link_costs, shape_of
from unickpt.planning.replay.graph import graph_of
from unickpt.planning.replay.trace import TraceGroup, window_of

ALPHA_S, BETA_S = 20e-6, 1e-9


@pytest.mark.parametrize("alpha", [0.0, ALPHA_S])
@pytest.mark.parametrize("beta", [0.0, BETA_S])
def test_the_constants_are_found_again(alpha: float, beta: float) -> None:
    if alpha == beta == 0:
        return
    kinds = np.array([(int(op), n, size) for op in (Op.ALL_REDUCE, Op.ALL_GATHER) for n in (2, 8) for size in (1000, 10**7)])
    seconds = np.array([alpha * shape_of(op, n)[0] + beta * shape_of(op, n)[1] * size for op, n, size in kinds.tolist()])
    line = fitted(kinds, seconds)
    assert line.alpha_s == pytest.approx(alpha, abs=1e-12)
    assert line.beta_s == pytest.approx(beta, abs=1e-15)
    assert line.error == pytest.approx(0.0, abs=1e-9)


def test_one_size_has_no_constant_part() -> None:
    line = fitted(np.array([(int(Op.ALL_REDUCE), 2, 1_000_000)]), np.array([1e-3]))
    assert (line.alpha_s, line.beta_s) == (0.0, pytest.approx(1e-9))


def test_small_sizes_say_nothing_of_the_bandwidth() -> None:
    """Messages of 4 and 256 bytes take 1 ms: one of 1 MB does not take an hour."""
    for sizes in ((256,), (4, 256)):
        line = fitted(np.array([(int(Op.RECEIVE), 2, size) for size in sizes]), np.full(len(sizes), 1e-3))
        assert (line.alpha_s, line.beta_s) == (pytest.approx(1e-3), 0.0)
    line = fitted(np.array([(int(Op.RECEIVE), 2, size) for size in (256, 512)]), np.array([1e-3, 2e-3]))
    assert line.beta_s == 0.0


def test_other_sizes_and_members_of_recorded_transfers_are_predicted() -> None:
    """All-reduces of 1 and 4 MB among two ranks of a host take 1 and 4 ms, a message between hosts 3 ms."""
    groups = [TraceGroup("data parallel", (0, 1)), TraceGroup("pipeline parallel", (0, 2))]
    made = []
    for rank in (0, 1):
        made.append(Made(rank, Op.ALL_REDUCE, 0, 1, 0, 0, 1_000_000, size=1_000_000))
        made.append(Made(rank, Op.ALL_REDUCE, 0, 2, 1_000_000, 1_000_000, 5_000_000, size=4_000_000))
    made.append(Made(0, Op.SEND, 1, 1, 5_000_000, 5_000_000, 8_000_000, (0, 2), size=1_000_000))
    made.append(Made(2, Op.RECEIVE, 1, 1, 5_000_000, 5_000_000, 8_000_000, (0, 2), size=1_000_000))
    trace = made_trace(groups, made, [[9_000_000]] * 3, hosts=["a", "a", "b"])
    costs = link_costs(graph_of(window_of(trace)))
    assert costs.seconds(Op.ALL_REDUCE, 2, 2_000_000) == pytest.approx(2e-3)
    assert costs.seconds(Op.ALL_REDUCE, 4, 2_000_000) == pytest.approx(3e-3)  # volume 1.5 instead of 1
    assert costs.seconds(Op.ALL_GATHER, 2, 2_000_000) == pytest.approx(1e-3)
    assert costs.seconds(Op.SEND, 2, 2_000_000, leaves_host=True) == pytest.approx(6e-3)
    assert costs.seconds(Op.SEND, 2, 2_000_000) == pytest.approx(6e-3)  # the nearest kind
    assert costs.seconds(Op.ALL_REDUCE, 1, 2_000_000) == 0.0
    assert LinkCosts({}).seconds(Op.SEND, 2, 1.0) == 0.0
