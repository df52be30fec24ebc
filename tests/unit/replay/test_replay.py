"""Replay of simulated and handmade jobs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.report_records import call, group, moment, ring
from unickpt.base.errors import FormatError
from unickpt.cli.main import main
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.planning.replay.price import Questions, analyse
from unickpt.planning.replay.sources import read_trace, trace_of_snapshot
from unickpt.planning.replay.trace import CALL, Trace
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace

LAYOUT = ParallelLayout(2, 2, 2)


def simulated(**more: Any) -> Trace:
    return simulated_trace(LAYOUT, 6, 4, **more)


def test_a_sound_job_is_replayed_exactly_and_costs_nothing() -> None:
    found = analyse(simulated())
    assert found.replayed_s == pytest.approx(found.step_s, rel=1e-9)
    assert found.slowdown == pytest.approx(1, rel=1e-9)
    assert max(found.by_rank.values()) == 0
    assert len(found.by_rank) == 8
    assert found.without_peers == ()
    assert found.typical_s == pytest.approx(found.step_s, rel=1e-6)


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_slow_rank_costs_what_a_sound_job_is_faster(rank: int) -> None:
    sound = analyse(simulated()).step_s
    found = analyse(simulated(slow={rank: 1.4}), questions=Questions(like_peers=(rank,)))
    assert found.ideal_s == pytest.approx(sound, rel=1e-6)
    assert found.by_rank[rank] == pytest.approx(found.step_s - sound, rel=1e-6)
    assert max(cost for other, cost in found.by_rank.items() if other != rank) < 1e-9
    assert found.answers[0].step_s == pytest.approx(sound, rel=1e-6)
    assert max(found.by_stage.values()) < 1e-9  # a slow rank is not an uneven partition


def test_varying_computation_is_no_slow_rank() -> None:
    noise, again = random.Random(1), random.Random(1)
    sound = analyse(simulated(jitter=lambda: noise.uniform(0.97, 1.03)))
    slow = analyse(simulated(jitter=lambda: again.uniform(0.97, 1.03), slow={6: 1.5}))
    assert slow.replayed_s == pytest.approx(slow.step_s, rel=1e-6)
    assert max(sound.by_rank.values()) < 0.02 * sound.step_s
    assert sound.typical_s == pytest.approx(sound.step_s, rel=0.03)
    assert sound.typical_s != pytest.approx(sound.step_s, rel=1e-4)
    assert slow.by_rank[6] == pytest.approx(slow.step_s - sound.step_s, rel=0.1)


def test_a_slow_stage_is_an_uneven_partition() -> None:
    found = analyse(simulated(slow=dict.fromkeys([4, 5, 6, 7], 1.3)))
    assert max(found.by_rank.values()) < 1e-9
    assert found.by_stage[1] == pytest.approx(found.step_s - analyse(simulated()).step_s, rel=0.01)


def test_a_slow_link_has_a_price(tmp_path: Path) -> None:
    """Ranks 0 and 2 send to ranks 1 and 3. The first pair takes 7 ms, the other one 1 ms."""
    groups = [group("pipeline parallel", range(4)), group("data parallel", range(4))]
    for rank in range(4):
        op, peer = (Op.RECEIVE, rank - 1) if rank % 2 else (Op.SEND, rank + 1)
        rows = [call(Op.BARRIER, 1, 1, 0.5, 1.0)]
        for step in range(1, 3):
            begin = 1.0 + 10.0 * (step - 1)
            over = begin + (8 if rank < 2 else 2)
            rows.append(call(op, 0, step, begin + 1, over, step=step, peer=peer, wait_ms=begin + 1))
            rows.append(call(Op.ALL_REDUCE, 1, step + 1, over + 1, begin + 10, step=step))
            rows.append(moment(Op.STEP, begin, begin + 10, step=step))
        ring(tmp_path, rank, 4, groups, rows, closed=True)
    found = analyse(read_trace([str(tmp_path)]), questions=Questions(links=((1, 0),)))
    assert found.by_link == pytest.approx({"0-1": 0.006, "2-3": 0.0})
    assert found.answers[0].step_s == pytest.approx(0.004)
    assert max(found.by_rank.values()) < 1e-9


def test_a_rank_without_peers_is_compared_with_other_stages() -> None:
    trace = simulated_trace(ParallelLayout(1, 2, 1), 4, 4, slow={1: 1.5})
    found = analyse(trace)
    assert found.without_peers == (0, 1)
    assert found.by_rank[1] > 0.05 * found.step_s
    assert found.by_rank[0] == 0


def two_ranks(folder: Path, *, pause: bool = False) -> Path:
    """Three steps of 20 ms, in which rank 1 computes 19 ms and rank 0 9 ms."""
    folder.mkdir(mode=0o700)
    groups = [group("data parallel", [0, 1])]
    for rank, own in ((0, 9.0), (1, 19.0)):
        rows = [call(Op.BARRIER, 0, 1, 0.5, 1.0)]
        for step in range(1, 4):
            begin = 1.0 + 20.0 * (step - 1)
            if pause and rank == 1:
                rows.append(moment(Op.DATA, begin + 1, begin + 11, step=step))
            rows.append(call(Op.ALL_REDUCE, 0, step + 1, begin + own, begin + 20, step=step))
            rows.append(moment(Op.STEP, begin, begin + 20, step=step))
        ring(folder, rank, 2, groups, rows, closed=True)
    return folder


def test_the_command_prices_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(two_ranks(tmp_path / "rings"))
    assert main(["whatif", folder, "--json", "--without-rank", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step_s"], found["replayed_s"]) == pytest.approx((0.020, 0.020))
    assert found["by_rank"] == pytest.approx({"0": 0.0, "1": 0.010})
    assert (found["ideal_s"], found["slowdown"]) == pytest.approx((0.010, 2.0))
    assert found["answers"][0]["step_s"] == pytest.approx(0.010)
    assert found["exposed"] == pytest.approx({"data parallel": 0.001})
    assert main(["whatif", folder, "--steps", "2:3"]) == 0
    assert "steps 2 to 3 of 2 ranks: 20.00 ms a step" in capsys.readouterr().out
    assert main(["whatif", folder, "--steps", "7:8"]) == 2
    assert "none of the steps 7 to 8" in capsys.readouterr().err


def test_communication_is_priced_by_operation_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a step of 20 ms, computation takes 12 ms, a gather of 1 KiB 2 ms, a reduction of 4 KiB 5 ms and a message 1 ms."""
    folder = tmp_path / "rings"
    folder.mkdir(mode=0o700)
    groups = [group("tensor parallel", [0, 1]), group("data parallel", [0, 1])]
    for rank in (0, 1):
        rows = []
        for step in range(1, 4):
            begin = 1.0 + 20.0 * (step - 1)
            rows.append(call(Op.ALL_GATHER, 0, 2 * step - 1, begin + 4, begin + 6, step=step, elements=256))
            rows.append(call(Op.ALL_REDUCE, 0, 2 * step, begin + 10, begin + 15, step=step, elements=1024))
            rows.append(call(Op.ALL_REDUCE, 1, step, begin + 19, begin + 20, step=step, elements=64))
            rows.append(moment(Op.STEP, begin, begin + 20, step=step))
        ring(folder, rank, 2, groups, rows, closed=True)
    assert main(["whatif", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exposed"] == pytest.approx({"tensor parallel": 0.007, "data parallel": 0.001})
    parts = found["exposed_operations"]
    assert len(parts) == 2
    assert sum(parts.values()) == pytest.approx(0.007)
    (gather,) = (value for name, value in parts.items() if name.startswith("tensor parallel: all_gather of "))
    (reduce,) = (value for name, value in parts.items() if name.startswith("tensor parallel: all_reduce of "))
    assert (gather, reduce) == pytest.approx((0.002, 0.005))
    assert main(["whatif", str(folder)]) == 0
    assert "the same by operation and size" in capsys.readouterr().out


def test_waits_for_data_are_a_cause(tmp_path: Path) -> None:
    found = analyse(read_trace([str(two_ranks(tmp_path / "rings", pause=True))]))
    assert found.by_cause["data"] == pytest.approx(0.010)
    assert found.by_cause["ranks unlike their peers"] == 0
    assert found.by_rank[1] == pytest.approx(0.010)


def test_a_snapshot_of_the_agent_gives_the_same_prices(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path / "rings")
    found = analyse(trace_of_snapshot(take_snapshot(read_folder(folder))))
    assert found.by_rank == pytest.approx(analyse(read_trace([str(folder)])).by_rank)


def test_a_broadcast_does_not_wait_for_other_receivers() -> None:
    trace = simulated_trace(ParallelLayout(1, 1, 4), 2, 1)
    calls = np.zeros(12, CALL)
    calls["rank"], calls["op"] = np.repeat(np.arange(4), 3), [int(Op.BROADCAST), int(Op.BROADCAST), int(Op.ALL_REDUCE)] * 4
    calls["source"] = calls["destination"] = -1
    calls["root"] = [0, 0, -1] * 4
    calls["seq"] = [1, 2, 3] * 4
    late = [0, 0, 0, 8]  # rank 3 computes longer before its first call
    calls["call_ns"] = [1 + at for wait in late for at in (1 + wait, 2 + wait, 3 + wait)]
    calls["wait_ns"] = calls["call_ns"]
    calls["end_ns"] = calls["call_ns"] + 1
    calls["end_ns"][2::3] = 13
    marks = trace.marks[trace.marks["number"] == 1].copy()
    marks["begin_ns"], marks["end_ns"] = 1, 20
    found = analyse(replace(trace, calls=calls, marks=marks), questions=Questions(like_peers=(3,)))
    assert found.replayed_s == pytest.approx(19e-9)
    assert found.answers[0].gain_s == pytest.approx(8e-9)


def test_calls_that_wait_for_each_other_are_refused() -> None:
    trace = simulated_trace(ParallelLayout(1, 1, 2), 2, 1)
    calls = np.zeros(4, CALL)
    calls["rank"], calls["op"], calls["seq"] = [0, 0, 1, 1], int(Op.ALL_REDUCE), 1
    calls["comm"] = [0, 1, 1, 0]
    calls["source"] = calls["destination"] = calls["root"] = -1
    calls["call_ns"] = calls["wait_ns"] = [2, 4, 2, 4]
    calls["end_ns"] = [3, 5, 3, 5]
    marks = trace.marks[trace.marks["number"] == 1].copy()
    marks["begin_ns"], marks["end_ns"] = 1, 20
    with pytest.raises(FormatError, match="in a circle"):
        analyse(replace(trace, calls=calls, marks=marks))


def test_steps_that_some_rank_lacks_are_left_out() -> None:
    trace = simulated()
    lost = (trace.marks["rank"] == 2) & (trace.marks["number"] == 3)
    found = analyse(replace(trace, marks=trace.marks[~lost]))
    assert found.steps == (4, 6)
    with pytest.raises(FormatError, match="larger rings"):
        analyse(replace(trace, marks=trace.marks[trace.marks["rank"] != 2]))


def test_the_report_has_the_prices(tmp_path: Path) -> None:
    folder, page = two_ranks(tmp_path / "rings"), tmp_path / "report.html"
    assert main(["report", str(folder), "-o", str(page), "--prices"]) == 0
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert data["prices"]["slowdown"] == pytest.approx(2.0)
    assert ["rank", "1", pytest.approx(0.010)] in data["prices"]["rows"]
    assert main(["report", str(folder), "-o", str(page)]) == 0
    assert '"prices":null' in page.read_text()
