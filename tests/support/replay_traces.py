"""Handmade traces for the tests of ``unickpt.planning.replay``. All times are nanoseconds on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.support.report_records import MS, Row, call, group, moment, ring
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.trace import CALL, MARK, PAUSE, Trace, TraceGroup


class Made(NamedTuple):
    """One call. ``pair`` is the global rank that sends and the one that receives; -1 twice for collectives."""

    rank: int
    op: Op
    comm: int
    seq: int
    call_ns: int
    wait_ns: int
    end_ns: int
    pair: tuple[int, int] = (-1, -1)
    size: int = 8


def made_trace(
    groups: Sequence[TraceGroup], calls: Sequence[Made], ends_ns: Sequence[Sequence[int]], *,
    places: Sequence[Mapping[str, int]] | None = None, hosts: Sequence[str] | None = None,
) -> Trace:  # fmt: skip
    """Return a trace of steps from 1.

    Args:
        groups: communicators.
        calls: calls of all ranks, in the order of the program of each.
        ends_ns: for each rank, the end of each step. The first step begins at 0.
        places, hosts: coordinates and host of each rank; default: none, and one host.
    """
    table = np.zeros(len(calls), CALL)
    for row, each in zip(table, calls, strict=True):
        row["rank"], row["comm"], row["op"], row["seq"], row["bytes"] = each.rank, each.comm, int(each.op), each.seq, each.size
        row["source"], row["destination"], row["root"] = (*each.pair, -1)
        row["call_ns"], row["wait_ns"], row["end_ns"] = each.call_ns, each.wait_ns, each.end_ns
    marks = np.array(
        [
            (rank, number, begin, end)
            for rank, own in enumerate(ends_ns)
            for number, (begin, end) in enumerate(zip([0, *own], own, strict=False), start=1)
        ],
        MARK,
    )
    count = len(ends_ns)
    return Trace(
        np.arange(count), tuple(hosts or ["host"] * count), tuple(places or [{}] * count), list(groups), table, marks,
        np.zeros(0, PAUSE),
    )  # fmt: skip


def write_rings(trace: Trace, folder: Path) -> Path:
    """Write a trace as the rings of its ranks, with at most 64 records each. All times are one millisecond later."""
    folder.mkdir(mode=0o700)
    own = [at for at, each in enumerate(trace.groups) if each.members]
    for rank in range(len(trace.ranks)):
        # a call before the first step shows that the step's begin is still in the ring
        rows: list[tuple[int, int, Row]] = [(-1, 0, call(Op.BARRIER, own[0], 0, 0.1, 0.2))]
        for each in trace.calls[trace.calls["rank"] == rank]:
            ends = trace.marks["end_ns"][(trace.marks["rank"] == rank) & (trace.marks["end_ns"] >= each["end_ns"])]
            step = int(trace.marks["number"][(trace.marks["rank"] == rank) & (trace.marks["end_ns"] == ends.min())][0])
            peer = int(each["destination"] if each["op"] == Op.SEND else each["source"])
            begin_ms, end_ms = 1 + each["call_ns"] / MS, 1 + each["end_ns"] / MS
            made = call(
                Op(int(each["op"])), int(each["comm"]), int(each["seq"]), begin_ms, end_ms, step=step,
                elements=int(each["bytes"]) // 4, peer=peer, wait_ms=1 + each["wait_ns"] / MS,
            )  # fmt: skip
            rows.append((int(each["call_ns"]), 0, made))
        for mark in trace.marks[trace.marks["rank"] == rank]:
            made = moment(Op.STEP, 1 + mark["begin_ns"] / MS, 1 + mark["end_ns"] / MS, step=int(mark["number"]))
            rows.append((int(mark["end_ns"]), 1, made))
        rows.sort(key=lambda row: row[:2])
        groups = [group(each.label, each.members) for each in trace.groups[: max(own) + 1]]
        ring(folder, rank, len(trace.ranks), groups, [row for _, _, row in rows], closed=True, host=trace.hosts[rank])
    return folder
