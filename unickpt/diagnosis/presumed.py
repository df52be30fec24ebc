"""Who waits in calls of which only the beginning is known: those that end on a device, as NCCL's do, where torch's flight
recorder does not tell (``unickpt/timing/flights.py``).

The host goes on as soon as such a call is in its stream, and stands still later, in whatever asks the device for a value. What
can be seen is that a rank makes no further call. Then it waits in its newest one, if somebody has not entered that; a call that
all have entered has presumably ended, and the rank stands elsewhere. Only where nobody waits like that, and all ranks stand,
is it the network.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.summaries import Summaries
from unickpt.diagnosis.waiting import Members


def presumed(rows: Summaries, on_device: Collection[int], members: Members, *, all_stand: bool) -> Summaries:
    """Rows in which those ranks are blocked, too, that presumably are.

    Args:
        rows: of all ranks.
        on_device: communicators whose calls end on a device.
        members: of every communicator.
        all_stand: whether all ranks have made no call for long: if nobody else waits, they wait for the network.
    """
    if not len(rows) or not on_device:
        return rows
    rows = rows[np.lexsort((rows["call_ns"], rows["rank"]))]
    newest = np.append(rows["rank"][1:] != rows["rank"][:-1], True)
    elsewhere = np.isin(rows["rank"], rows["rank"][rows["blocked"] > 0])
    asked = newest & ~elsewhere & np.isin(rows["comm"], list(on_device)) & (rows["ended"] < rows["entered"])
    waits = asked & np.where(rows["source"] < 0, _lacks_members(rows, members), _lacks_the_other(rows, asked))
    if not waits.any() and all_stand and not rows["blocked"].any():
        waits = asked
    rows["blocked"] = np.where(waits, rows["entered"], rows["blocked"])
    return rows


def _lacks_members(rows: Summaries, members: Members) -> npt.NDArray[np.bool_]:
    """Of each row of a collective: fewer ranks have entered that call than the communicator has members."""
    collective = np.flatnonzero(rows["source"] < 0)
    comm, entered = rows["comm"][collective], rows["entered"][collective]
    order = np.lexsort((entered, comm))
    comm, entered = comm[order], entered[order]
    calls = np.flatnonzero(np.append(True, (comm[1:] != comm[:-1]) | (entered[1:] != entered[:-1])))
    ends = np.searchsorted(comm, comm[calls], side="right")
    known = np.array([len(members.get(number, ())) for number in comm[calls].tolist()], np.int64)
    lacks = np.repeat(ends - calls < known, np.diff(np.append(calls, len(comm))))  # whoever is at this call or beyond
    out = np.zeros(len(rows), bool)
    out[collective[order]] = lacks
    return out


def _lacks_the_other(rows: Summaries, asked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Of each point-to-point row that is asked for: the other side has not made that call."""
    columns = ["comm", "source", "destination", "rank", "entered"]
    entered = {tuple(key): count for *key, count in rows[columns][rows["source"] >= 0].tolist()}
    out = np.zeros(len(rows), bool)
    for at in np.flatnonzero(asked & (rows["source"] >= 0)).tolist():
        comm, source, destination, rank, count = rows[columns][at].item()
        other = destination if rank == source else source
        out[at] = other >= 0 and entered.get((comm, source, destination, other), 0) < count
    return out
