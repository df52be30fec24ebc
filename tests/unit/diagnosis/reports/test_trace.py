"""Traces in the Chrome trace event format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.report_records import call, group, moment, ring
from tests.unit.diagnosis.reports.jobs import WORLD, job_of_four, pipeline, records_of, trace_events
from unickpt.diagnosis.recording.records import Flag, Op
from unickpt.diagnosis.reports.perfetto import write_trace


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_every_call_and_arrows_from_send_to_receive(tmp_path: Path, name: str) -> None:
    view = pipeline(tmp_path)
    count = write_trace(view, tmp_path / name)
    events = trace_events(tmp_path / name)
    assert len(events) == count
    calls = [e for e in events if e["ph"] == "X" and e["cat"] == "call"]
    assert len(calls) == 10
    first = next(e for e in calls if e["pid"] == 1 and e["args"]["seq"] == 1)
    assert first["dur"] == 9000.0
    assert first["args"] == {
        "op": "send", "seq": 1, "step": 0, "bytes_in": 1024, "bytes_out": 1024, "dtype": "F32", "peer": 1, "phase": "forward",
        "waited_ms": 9.0, "group": "pipeline parallel", "communicator": "pipeline parallel-[0, 1]", "ranks": 2,
    }  # fmt: skip
    (going,) = [e for e in calls if "end" in e["args"]]
    assert (going["pid"], going["dur"], going["args"]["end"]) == (2, 50_000.0, "has not ended when the job was read")
    assert len([e for e in events if e["ph"] == "s"]) == 4
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0 (host a, pp 0)", "rank 1 (host a, pp 1)",
    ]  # fmt: skip


def test_overlapping_calls_are_on_separate_threads(tmp_path: Path) -> None:
    asynchronous = [call(Op.ALL_GATHER, 0, n, 10.0 * n, 10.0 * n + 25, wait_ms=-1, flags=int(Flag.ASYNC)) for n in range(1, 9)]
    ring(tmp_path, 0, 2, [group("data parallel", [0, 1])], asynchronous)
    write_trace(records_of(tmp_path), tmp_path / "trace.json")
    assert len({e["tid"] for e in trace_events(tmp_path / "trace.json") if e.get("cat") == "call"}) == 3


def test_steps_moments_and_phases_are_in_the_trace(tmp_path: Path) -> None:
    job_of_four(tmp_path)
    write_trace(records_of(tmp_path), tmp_path / "trace.json")
    events = [e for e in trace_events(tmp_path / "trace.json") if e["ph"] == "X" and e["pid"] == 2]
    assert [e["name"] for e in events if e["cat"] == "moment"] == ["step 0", "step 1", "checkpoint", "data", "garbage"]
    assert [e["name"] for e in events if e["cat"] == "phase"] == ["forward", "optimizer"] * 2


def test_consecutive_steps_do_not_overlap_after_rounding(tmp_path: Path) -> None:
    """Viewers add begin and duration as floats. Speedscope does not close a step that ends 1e-10 us after the next begins."""
    rows = [moment(Op.STEP, 1000 + 7.000333 * n, 1000 + 7.000333 * (n + 1), step=n) for n in range(50)]
    ring(tmp_path, 0, 1, [WORLD], rows)
    write_trace(records_of(tmp_path), tmp_path / "trace.json")
    assert len([e for e in trace_events(tmp_path / "trace.json") if e["ph"] == "X"]) == 50


def test_a_device_call_without_a_recorded_end_has_no_duration(tmp_path: Path) -> None:
    rows = [call(Op.ALL_REDUCE, 0, 1, 10, None, wait_ms=-1)]
    ring(tmp_path, 0, 2, [group("data parallel", [0, 1], backend="nccl")], rows, heartbeat_ms=900)
    write_trace(records_of(tmp_path), tmp_path / "trace.json")
    (event,) = [e for e in trace_events(tmp_path / "trace.json") if e["ph"] == "X" and e["cat"] == "call"]
    assert (event["dur"], event["args"]["end"]) == (0, "not noted")
