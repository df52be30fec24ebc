"""Progress of a rank: its position in every communicator, and the call that it waits in.

A ring holds tens of thousands of records; its progress is a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.recording.records import Op, Records, ends_of

# One row per communicator and rank; for point-to-point calls one per pair of ranks and direction.
PROGRESS = np.dtype(
    [
        ("rank", "i4"),
        ("comm", "i4"),  # number of the communicator in the job, from ``number_groups``
        ("source", "i4"),  # of point-to-point calls; -1 for collectives
        ("destination", "i4"),
        ("entered", "u8"),  # last call that the rank has made
        ("ended", "u8"),  # last call that has ended on the rank
        ("blocked", "u8"),  # call that the rank waits in; 0 for none
        ("call_ns", "i8"),  # time of the call in ``blocked``, or else of the last call
        ("op", "u1"),  # of that call
        ("dtype", "u1"),
        ("shape", "u4"),
        ("elements", "u8"),  # that the rank sends
    ]
)
ProgressTable = npt.NDArray[Any]  # of dtype ``PROGRESS``


def number_groups(names: Sequence[str], known: dict[str, int]) -> npt.NDArray[np.int32]:
    """Return the numbers of communicators in the job by name; new names are added to ``known``."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int32)


def rank_progress(rank: int, records: Records, numbers: npt.NDArray[np.int32], *, offset_ns: int = 0) -> ProgressTable:
    """Return the rows of one rank.

    Args:
        rank: global rank.
        records: records of the rank, the oldest first.
        numbers: number in the job of each communicator in the rank's table.
        offset_ns: nanoseconds to add to times of the rank.
    """
    calls = records[records["op"] <= Op.RECEIVE]
    if not len(calls):
        return np.zeros(0, PROGRESS)
    keys = np.stack([calls["comm"].astype(np.int64), *ends_of(rank, calls), calls["op"] == Op.RECEIVE])
    pairs = (calls["op"] >= Op.SEND).any()
    order = np.lexsort((calls["seq"], *(keys if pairs else keys[:1])))
    calls, keys = calls[order], keys[:, order]
    last = np.ones(len(calls), bool)
    last[:-1] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    group = np.cumsum(last) - last
    out = np.zeros(int(last.sum()), PROGRESS)
    out["rank"], out["comm"] = rank, numbers[calls["comm"][last]]
    out["source"], out["destination"] = keys[1, last], keys[2, last]
    out["entered"] = calls["seq"][last]
    done = calls["end_ns"] > 0
    np.maximum.at(out["ended"], group[done], calls["seq"][done])
    entries = np.flatnonzero(last)
    at = _waited_in(calls)
    if at is not None:
        out["blocked"][group[at]] = calls["seq"][at]
        entries[group[at]] = at
    out["call_ns"] = calls["call_ns"][entries] + offset_ns
    for name, column in (("op", "op"), ("dtype", "dtype"), ("shape", "shape"), ("elements", "elements_in")):
        out[name] = calls[column][entries]
    return out


def _waited_in(calls: Records) -> int | None:
    """Return the position of the call that the rank waits in: the last one with a wait, unless it has ended.

    A rank that has made another call since does not wait.
    """
    waits = (calls["end_ns"] == 0) & (calls["wait_ns"] > 0)
    if not waits.any():
        return None
    places = np.flatnonzero(waits)
    at = int(places[np.argmax(calls["wait_ns"][places])])
    return at if calls["call_ns"].max() <= calls["wait_ns"][at] else None
