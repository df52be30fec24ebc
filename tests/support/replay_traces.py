"""Handmade traces for the tests of ``unickpt.replay``. All times are nanoseconds on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from unickpt.diagnosis.recording.records import Op
from unickpt.replay.trace import CALL, MARK, PAUSE, Trace, TraceGroup


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
