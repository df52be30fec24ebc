"""What of a rank's records the others need to know: where it is in every communicator, and what it waits in.

A rank's ring holds tens of thousands of records; of these a few rows are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.timing.records import Op, Records

# One row per communicator and rank; of point-to-point calls one per pair of ranks and direction.
SUMMARY = np.dtype(
    [
        ("rank", "i4"),
        ("comm", "i4"),  # number of the communicator in the job, as ``numbered`` gives it
        ("source", "i4"),  # of point-to-point calls; -1 for collectives
        ("destination", "i4"),
        ("entered", "u8"),  # the last call that the rank has made
        ("ended", "u8"),  # the last one that has ended on it
        ("blocked", "u8"),  # the call that the rank waits in, 0 for none
        ("call_ns", "i8"),  # when it was made; of the last one, if the rank waits in none
        ("op", "u1"),  # of that call
        ("dtype", "u1"),
        ("shape", "u4"),
        ("elements", "u8"),  # of what it gives
    ]
)
Summaries = npt.NDArray[Any]  # of dtype ``SUMMARY``


def numbered(names: Sequence[str], known: dict[str, int]) -> npt.NDArray[np.int32]:
    """Numbers of communicators in the job, by their names; new ones are added to ``known``."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int32)


def summary(rank: int, records: Records, numbers: npt.NDArray[np.int32], *, offset_ns: int = 0) -> Summaries:
    """The rows of one rank.

    Args:
        rank: whose records they are.
        records: by number, the oldest first.
        numbers: of its communicators in the job, by their position in its table.
        offset_ns: what its clock is behind the job's.
    """
    calls = records[records["op"] <= Op.RECEIVE]
    if not len(calls):
        return np.zeros(0, SUMMARY)
    single = calls["op"] >= Op.SEND
    source = np.where(calls["op"] == Op.SEND, rank, np.where(single, calls["peer"], -1))
    destination = np.where(calls["op"] == Op.RECEIVE, rank, np.where(single, calls["peer"], -1))
    keys = np.stack([calls["comm"].astype(np.int64), source, destination, single & (calls["op"] == Op.RECEIVE)])
    order = np.lexsort((calls["seq"], *keys))
    calls, keys = calls[order], keys[:, order]
    last = np.ones(len(calls), bool)
    last[:-1] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    group = np.cumsum(last) - last
    out = np.zeros(int(last.sum()), SUMMARY)
    out["rank"], out["comm"] = rank, numbers[calls["comm"][last]]
    out["source"], out["destination"] = keys[1, last], keys[2, last]
    out["entered"] = calls["seq"][last]
    done = calls["end_ns"] > 0
    np.maximum.at(out["ended"], group[done], calls["seq"][done])
    told = np.flatnonzero(last)
    at = _waited_in(calls)
    if at is not None:
        out["blocked"][group[at]] = calls["seq"][at]
        told[group[at]] = at
    out["call_ns"] = calls["call_ns"][told] + offset_ns
    for name, column in (("op", "op"), ("dtype", "dtype"), ("shape", "shape"), ("elements", "elements_in")):
        out[name] = calls[column][told]
    return out


def _waited_in(calls: Records) -> int | None:
    """Position of the call that the rank waits in: the one that somebody began to wait for last, if it has not ended.

    A rank that has made another call since then does not wait.
    """
    waits = (calls["end_ns"] == 0) & (calls["wait_ns"] > 0)
    if not waits.any():
        return None
    places = np.flatnonzero(waits)
    at = int(places[np.argmax(calls["wait_ns"][places])])
    return at if calls["call_ns"].max() <= calls["wait_ns"][at] else None
