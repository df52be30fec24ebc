"""Progress of a rank: its position in every communicator, and the call that it waits in.

A ring holds tens of thousands of records; its progress is a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints, row_numbers
from unickpt.diagnosis.recording.records import Flag, Op, Records, ends_of
from unickpt.diagnosis.snapshot.columns import AT, Columns, columns_of, largest

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
        ("native", "u1"),  # whether torch's own C++ has made the call, whose waits are not recorded
    ]
)
ProgressTable = npt.NDArray[Any]  # of dtype ``PROGRESS``


def number_groups(names: Sequence[str], known: dict[str, int]) -> npt.NDArray[np.int32]:
    """Return the numbers of communicators in the job by name; new names are added to ``known``."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int32)


def rank_progress(rank: int, records: Records, numbers: npt.NDArray[np.int32], *, offset_ns: int = 0) -> ProgressTable:
    """Return the rows of one rank. See ``progress_of_ranks``.

    Args:
        rank: global rank.
        records: records of the rank, the oldest first.
        numbers: number in the job of each communicator in the rank's table.
        offset_ns: nanoseconds to add to times of the rank.
    """
    calls = columns_of({rank: records[records["op"] <= Op.RECEIVE]})
    comms = numbers[calls["comm"]] if len(calls) else np.zeros(0, np.int32)
    return progress_of_ranks(calls, comms, np.array([offset_ns]))


def progress_of_ranks(calls: Columns, comms: npt.NDArray[np.int32], offsets_ns: Ints) -> ProgressTable:
    """Return the rows of ranks, ordered by rank.

    Args:
        calls: records of calls of all ranks.
        comms: number in the job of the communicator of each call, ``[n]``.
        offsets_ns: nanoseconds to add to times of each rank, int64 ``[r]``.
    """
    if not len(calls):
        return np.zeros(0, PROGRESS)
    at, seq = calls[AT], calls["seq"]
    row = _rows(calls)
    out = np.zeros(int(row.max()) + 1, PROGRESS)
    entered, ended = np.zeros((2, len(out)), np.uint64)  # contiguous, unlike columns of ``out``: ``at`` is faster
    np.maximum.at(entered, row, seq)
    done = np.flatnonzero(calls["end_ns"] > 0)
    np.maximum.at(ended, row[done], seq[done])
    out["entered"], out["ended"] = entered, ended
    entries = np.zeros(len(out), np.int64)
    last = np.flatnonzero(seq == entered[row])
    entries[row[last]] = last  # of several, the last one
    waited_in = _waited_in(calls)
    out["blocked"][row[waited_in]] = seq[waited_in]
    entries[row[waited_in]] = waited_in
    out["rank"], out["comm"] = calls.ranks[at[entries]], comms[entries]
    of_entries = calls.take(entries)
    out["source"], out["destination"] = ends_of(out["rank"], of_entries)
    out["call_ns"] = of_entries["call_ns"] + offsets_ns[at[entries]]
    for name, column in (("op", "op"), ("dtype", "dtype"), ("shape", "shape"), ("elements", "elements_in")):
        out[name] = of_entries[column]
    out["native"] = (of_entries["flags"] & int(Flag.FROM_NATIVE)) > 0
    return out


def _rows(calls: Columns) -> Ints:
    """Return int64 ``[n]``: number of the row of each call, in the order of the ranks."""
    keys = calls[AT] << 16 | calls["comm"]
    pairs = calls["op"] >= Op.SEND
    if not pairs.any():
        found: Ints = np.unique(keys, return_inverse=True)[1].reshape(-1)
        return found
    return row_numbers(keys, np.where(pairs, calls["op"], 0), np.where(pairs, calls["peer"], -1))


def _waited_in(calls: Columns) -> Ints:
    """Return the place of the call that each rank waits in, for ranks that wait: the last one with a wait, not ended.

    A rank that has made another call since does not wait.
    """
    at, ranks = calls[AT], len(calls.ranks)
    waits = np.flatnonzero((calls["end_ns"] == 0) & (calls["wait_ns"] > 0))
    if not len(waits):
        return waits
    found = largest(at[waits], calls["wait_ns"][waits], ranks)
    places = waits[found[found >= 0]]
    newest_ns = np.full(ranks, np.iinfo(np.int64).min)
    np.maximum.at(newest_ns, at, calls["call_ns"])
    kept: Ints = places[newest_ns[at[places]] <= calls["wait_ns"][places]]
    return kept
