"""Handmade jobs with known lateness and transfers, and the events of a trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.report_records import call, group, moment, ring
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder
from unickpt.diagnosis.reports.job_records import JobRecords, gather_records

WORLD = group("data parallel", range(4))


def job_of_four(folder: Path, **more: Any) -> HostRings:
    """Write two steps of 100 ms with two all-reduces each. Rank 2 enters the first one 30 ms late in step 0, 10 ms in step 1.

    Rank 1 waits 4 ms for data and collects garbage for 2 ms in step 0.
    """
    for rank in range(4):
        rows, seq = [moment(Op.CHECKPOINT, 990, 995, step=0)], 0  # an earlier record, so that the first step is complete
        for step, late in ((0, 30.0), (1, 10.0)):
            begin = 1000.0 + 100 * step
            if rank == 1 and step == 0:
                rows += [moment(Op.DATA, begin + 1, begin + 5, step=0), moment(Op.GARBAGE, begin + 6, begin + 8, step=0)]
            entered = begin + 20 + rank + (late if rank == 2 else 0)
            rows.append(call(Op.ALL_REDUCE, 0, seq + 1, entered, begin + 60, step=step))
            rows.append(call(Op.ALL_REDUCE, 0, seq + 2, begin + 80, begin + 90, step=step, phase=Phase.OPTIMIZER))
            rows.append(moment(Op.STEP, begin, begin + 100, step=step))
            seq += 2
        ring(folder, rank, 4, [WORLD], rows, step=2, **more)
    return read_folder(folder)


def records_of(folder: Path, **offsets: int) -> JobRecords:
    return gather_records([read_folder(folder)], offsets)


def pipeline(folder: Path, **more: Any) -> JobRecords:
    """Rank 0 sends 1 KiB to rank 1 three times, in 1, 2 and 3 ms after both have entered, and 4 KiB once, in 7 ms."""
    stages = group("pipeline parallel", [0, 1])
    sends = [call(Op.SEND, 0, n, 100.0 * n, 100.0 * n + 9, peer=1, elements=256) for n in (1, 2, 3)]
    gets = [call(Op.RECEIVE, 0, n, 100.0 * n - 50, 100.0 * n + n, peer=0, elements=256) for n in (1, 2, 3)]
    sends.append(call(Op.SEND, 0, 4, 400, 410, peer=1, elements=1024))
    gets.append(call(Op.RECEIVE, 0, 4, 420, 427, peer=0, elements=1024))
    sends.append(call(Op.SEND, 0, 5, 500, 501, peer=1))  # without a receive
    gets.append(call(Op.RECEIVE, 0, 6, 600, None, peer=0))  # without a send
    ring(folder, 0, 2, [stages], sends, **more)
    ring(folder, 1, 2, [stages], gets, heartbeat_ms=650, **more)
    return records_of(folder)


def trace_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace. Checks that events are ordered and do not overlap partially, and that flows bind."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MXsf"
        if event["ph"] != "M":
            assert event["ts"] >= 0
            threads[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert set(threads) <= named
    for found in threads.values():
        assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)
        open_until: list[float] = []
        for event in found:
            if event["ph"] == "X":
                assert event["dur"] >= 0
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
                open_until.append(event["ts"] + event["dur"])
            else:
                spans = [e for e in found if e["ph"] == "X" and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]
                assert spans, "a flow without a slice"
    for ends in flows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["f"]["bp"] == "e"
    return events
