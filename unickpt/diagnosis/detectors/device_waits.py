"""Infer waits that are not recorded: in calls that end on a device (NCCL), where torch's flight recorder gives no counts
(``unickpt/diagnosis/recording/flight_recorder.py``), and in calls of torch's own C++, such as those of the reducer of
``DistributedDataParallel``.

The host continues as soon as a call of the first kind is in its stream, and blocks later, when it reads a value from the
device. The reducer makes its calls during the backward pass and waits for the last one in C++. The records show only that a
rank makes no further call. The rank is taken to wait in its newest call if a member has not entered that call. A call that all
members have entered has probably ended, unless they entered it with different operations, element types or shapes: then it may
end on some members only.

If no rank waits in this sense and all ranks have been idle for long, a call before the newest one that members entered in
different ways holds them, since the device works in order. Without such a call the network is at fault.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.mismatches import sizes
from unickpt.diagnosis.detectors.waits import Members
from unickpt.diagnosis.snapshot.progress import ProgressTable


def infer_device_waits(rows: ProgressTable, on_device: Collection[int], members: Members, *, all_stand: bool) -> ProgressTable:
    """Return the rows with inferred waits entered in the column ``blocked``.

    Args:
        rows: progress of all ranks.
        on_device: communicators whose calls end on a device.
        members: members of every communicator.
        all_stand: whether no rank has made a call for long. Then a wait is inferred also if all ranks have made all calls.
    """
    if not len(rows) or not (on_device or rows["native"].any()):
        return rows
    rows = rows[np.lexsort((rows["call_ns"], rows["rank"]))]
    newest = np.append(rows["rank"][1:] != rows["rank"][:-1], True)
    elsewhere = np.isin(rows["rank"], rows["rank"][rows["blocked"] > 0])
    unrecorded = np.isin(rows["comm"], list(on_device)) | (rows["native"] > 0)
    under_way = ~elsewhere & unrecorded & (rows["ended"] < rows["entered"])
    asked = newest & under_way
    lacks = np.where(rows["source"] < 0, _lacks_members(rows, members), _lacks_the_other(rows, asked))
    differs = _differs(rows)
    waits = asked & (lacks | differs)
    if not waits.any() and all_stand and not rows["blocked"].any():
        before = _first_of_each_rank(rows, under_way & differs & np.isin(rows["rank"], rows["rank"][asked]))
        waits = before if before.any() else asked
    rows["blocked"] = np.where(waits, rows["entered"], rows["blocked"])
    return rows


def _first_of_each_rank(rows: ProgressTable, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the first row of each rank in ``among``. The rows are sorted by rank."""
    at = np.flatnonzero(among)
    out = np.zeros(len(rows), bool)
    out[at[np.unique(rows["rank"][at], return_index=True)[1]]] = True
    return out


def _lacks_members(rows: ProgressTable, members: Members) -> npt.NDArray[np.bool_]:
    """Return for each row of a collective whether a member has not entered that call."""
    collective = np.flatnonzero(rows["source"] < 0)
    comm, entered = rows["comm"][collective], rows["entered"][collective]
    order = np.lexsort((entered, comm))
    comm, entered = comm[order], entered[order]
    calls = np.flatnonzero(np.append(True, (comm[1:] != comm[:-1]) | (entered[1:] != entered[:-1])))
    ends = np.searchsorted(comm, comm[calls], side="right")
    known = np.array([len(members.get(number, ())) for number in comm[calls].tolist()], np.int64)
    lacks = np.repeat(ends - calls < known, np.diff(np.append(calls, len(comm))))  # ranks at this call or a later one
    out = np.zeros(len(rows), bool)
    out[collective[order]] = lacks
    return out


def _differs(rows: ProgressTable) -> npt.NDArray[np.bool_]:
    """Return for each row of a collective whether members have entered that call in different ways."""
    collective = np.flatnonzero(rows["source"] < 0)
    part = rows[collective]
    calls, group = np.unique(part[["comm", "entered"]], return_inverse=True)
    columns = (group, part["op"], part["dtype"], sizes(part, group))
    ways = np.unique(np.stack([each.astype(np.uint64) for each in columns], axis=1), axis=0)
    out = np.zeros(len(rows), bool)
    out[collective] = (np.bincount(ways[:, 0].astype(np.intp), minlength=len(calls)) > 1)[group]
    return out


def _lacks_the_other(rows: ProgressTable, asked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return for each point-to-point row in ``asked`` whether the other side has not made that call."""
    columns = ["comm", "source", "destination", "rank", "entered"]
    entered = {tuple(key): count for *key, count in rows[columns][rows["source"] >= 0].tolist()}
    out = np.zeros(len(rows), bool)
    for at in np.flatnonzero(asked & (rows["source"] >= 0)).tolist():
        comm, source, destination, rank, count = rows[columns][at].item()
        other = destination if rank == source else source
        out[at] = other >= 0 and entered.get((comm, source, destination, other), 0) < count
    return out
