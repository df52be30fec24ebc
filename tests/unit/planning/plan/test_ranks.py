"""Orders of ranks and hosts against all orders."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.support.replay_traces import Made, made_trace, write_rings
from unickpt.base.errors import FormatError
from unickpt.cli.main import main
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.plan import ranks
from unickpt.planning.plan.ranks import RankOrder, best_order, host_order, hostfile, plan_order, rankfile, rendezvous_order
from unickpt.planning.replay.trace import Trace, TraceGroup

MS = 1_000_000


def hosts_with_a_slow_link(count: int = 4) -> Trace:
    """One rank on each host. Pairs of neighbours exchange messages: host 0 and 1 in 40 ms, all others in 5 ms.

    The pairs (0, 1) and (2, 3) make eight exchanges in a step, (0, 2), (1, 3), (0, 3) and (1, 2) make one.
    """
    pairs = {(0, 1): (8, 40), (2, 3): (8, 5), (0, 2): (1, 5), (1, 3): (1, 5), (0, 3): (1, 5), (1, 2): (1, 5)}
    groups = [TraceGroup("pipeline parallel", tuple(range(count)))]
    made = []
    clock = [0] * count
    for (a, b), (times, each) in pairs.items():
        for at in range(times):
            end = max(clock[a], clock[b]) + MS + each * MS
            for rank, op in ((a, Op.SEND), (b, Op.RECEIVE)):
                made.append(Made(rank, op, 0, at + 1, clock[rank] + MS, clock[rank] + MS, end, (a, b)))
                clock[rank] = end
    made.sort(key=lambda call: (call.rank, call.call_ns))
    return made_trace(groups, made, [[each + MS] for each in clock], hosts=["a", "b", "c", "d"])


def test_the_heavy_pair_leaves_the_slow_link() -> None:
    trace = hosts_with_a_slow_link()
    found = plan_order(trace)
    assert found.tried == 24
    assert found.unknown == 0
    heavy = {tuple(sorted((found.order[0], found.order[1]))), tuple(sorted((found.order[2], found.order[3])))}
    assert (0, 1) not in heavy
    assert found.now_s == pytest.approx(0.340, rel=0.05)
    assert found.step_s < 0.3 * found.now_s


def test_many_blocks_are_exchanged_until_none_helps() -> None:
    """The cost of an order is the sum of what each block costs at its place: exchanges find the least of them."""
    costs = np.random.default_rng(3).uniform(0.5, 2.0, (7, 7))

    def predict(orders: list[RankOrder]) -> list[float | None]:
        return [float(sum(costs[rank, place] for rank, place in enumerate(order))) for order in orders]

    found = best_order([[at] for at in range(7)], predict)  # type: ignore[arg-type]
    least = min(sum(costs[rank, place] for rank, place in enumerate(order)) for order in permutations(range(7)))
    assert found.step_s == pytest.approx(float(least), rel=0.1)
    assert found.step_s < 0.8 * found.now_s
    assert found.tried <= 7 * 21 + 1


def test_orders_that_cannot_be_predicted_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = best_order([[0], [1], [2]], lambda orders: [1.0 if order == (0, 1, 2) else None for order in orders])
    assert (found.order, found.unknown, found.tried) == ((0, 1, 2), 5, 6)
    monkeypatch.setattr(ranks, "MOST_TRIED", 3)
    assert best_order([[0], [1], [2]], lambda orders: [1.0] * len(orders)).tried == 3


def test_hosts_move_with_all_their_ranks() -> None:
    groups = [TraceGroup("data parallel", tuple(range(4)))]
    made = [Made(rank, Op.ALL_REDUCE, 0, 1, 10, 10, 15) for rank in range(4)]
    trace = made_trace(groups, made, [[15]] * 4, hosts=["a", "a", "b", "b"])
    assert ranks.blocks_of(trace) == [[0, 1], [2, 3]]
    order = (2, 3, 0, 1)
    assert host_order(trace, order) == ["b", "a"]
    assert rendezvous_order(trace, order) == "order=b+a"
    assert hostfile(trace, order) == "b slots=2\na slots=2\n"
    assert rankfile(trace, order) == "rank 0=b slot=0\nrank 1=b slot=1\nrank 2=a slot=0\nrank 3=a slot=1\n"
    uneven = made_trace(groups, made, [[15]] * 4, hosts=["a", "a", "a", "b"])
    with pytest.raises(FormatError, match="different numbers of ranks"):
        plan_order(uneven)


def test_the_command_prints_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = hosts_with_a_slow_link()
    rings = str(write_rings(trace, tmp_path / "rings"))
    assert main(["plan", "ranks", rings, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["order"]) == [0, 1, 2, 3]
    assert found["step_s"] < 0.3 * found["now_s"]
    assert found["rdzv_conf"] == f"order={'+'.join(found['hosts'])}"
    assert main(["plan", "ranks", rings, "--rankfile"]) == 0
    assert capsys.readouterr().out.count("slot=") == 4
    assert main(["plan", "ranks", rings]) == 0
    assert "with the best of 24 orders" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "ranks", rings, "--steps", "5"])
