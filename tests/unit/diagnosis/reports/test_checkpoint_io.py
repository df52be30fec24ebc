"""Phases of saves and loads in handmade rings, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.support.report_records import MS, Row, call, ring
from tests.unit.diagnosis.reports.jobs import records_of, trace_events
from unickpt.diagnosis.recording.records import Flag, Op
from unickpt.diagnosis.reports.checkpoint_io import PhaseSummary, checkpoint_io
from unickpt.diagnosis.reports.html_report import contents
from unickpt.diagnosis.reports.perfetto import write_trace


def phase(op: Op, begin_ms: float, end_ms: float, step: int, size_bytes: int = 0, flags: int = 0) -> Row:
    """Return the record of a phase. Handmade records have elements of four bytes."""
    return call(op, 0, 0, begin_ms, end_ms, step=step, elements=size_bytes // 4, wait_ms=-1, flags=flags)


def test_seconds_and_bytes_are_those_of_each_rank_and_the_slowest_is_named(tmp_path: Path) -> None:
    """Rank 2 writes for 300 ms at step 10 and 100 ms at step 20, the others for 50 ms. Only rank 0 reads."""
    for rank in range(4):
        rows = [phase(Op.LOAD_READ, 1, 5, 7, 4000)] if rank == 0 else []
        for number, step in enumerate((10, 20)):
            begin = 1000.0 * (number + 1)
            end = begin + ((300, 100)[number] if rank == 2 else 50)
            rows.append(phase(Op.SAVE_WRITE, begin, end, step, 8000, flags=int(Flag.ASYNC)))
            rows.append(phase(Op.SAVE_COMMIT, end, begin + 310, step))
        ring(tmp_path, rank, 4, [], rows, step=20)
    found = checkpoint_io(records_of(tmp_path))
    assert (found.ranks.tolist(), found.steps.tolist()) == ([0, 1, 2, 3], [7, 10, 20])
    nan = float("nan")
    expected = [[nan, 50, 50], [nan, 50, 50], [nan, 300, 100], [nan, 50, 50]]
    assert np.array_equal(found.times["save_write"] / MS, expected, equal_nan=True)
    assert set(found.sizes) == {"save_write", "load_read"}
    assert found.summaries[0] == PhaseSummary("save_write", 4, 50 * MS, 2, 200 * MS, 8000, 64_000, True)
    assert [(each.phase, each.slowest, each.ranks) for each in found.summaries[1:]] == [
        ("save_commit", 0, 4),
        ("load_read", 0, 1),
    ]
    shown = json.loads(json.dumps(contents(records_of(tmp_path), [])))["io"]
    assert list(shown["measures"]) == [
        "time:save_write", "time:save_commit", "time:load_read", "size:save_write", "size:load_read",
    ]  # fmt: skip
    write_trace(records_of(tmp_path), tmp_path / "trace.json")
    assert {"save_write", "load_read"} <= {event["name"] for event in trace_events(tmp_path / "trace.json")}


def test_without_saves_and_loads_the_page_has_no_such_section(tmp_path: Path) -> None:
    ring(tmp_path, 0, 1, [], [], step=0)
    assert contents(records_of(tmp_path), [])["io"] is None
