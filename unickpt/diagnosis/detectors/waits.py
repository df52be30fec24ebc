"""Calls in which ranks wait, and the ranks that they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.observations import CallRef
from unickpt.diagnosis.recording.records import ITEMSIZES, Op
from unickpt.diagnosis.snapshot.progress import ProgressTable
from unickpt.diagnosis.snapshot.snapshot import GroupInfo

Members = Mapping[int, npt.NDArray[np.int64]]
Groups = Mapping[int, GroupInfo]


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call in which at least one rank waits.

    Attributes:
        comm: number of the communicator.
        seq: sequence number of the call.
        pair: source and destination of a point-to-point call; None for a collective.
        waiters: ranks that wait in the call.
        missing: ranks that the call waits for.
        since_ns: time at which the last waiter entered. If no rank is missing, others may have entered later and got through,
            and this is the time at which they had.
        op: operation.
        bytes: size of the tensors that a waiter gives.
    """

    comm: int
    seq: int
    pair: tuple[int, int] | None
    waiters: tuple[int, ...]
    missing: tuple[int, ...]
    since_ns: int
    op: Op
    bytes: int = 0

    def ref(self, groups: Groups) -> CallRef:
        """Identity of the call."""
        return CallRef(self.op, self.seq, group_of(self.comm, groups), self.pair)


def group_of(comm: int, groups: Groups) -> GroupInfo:
    """The communicator with a number; one without members, if it is unknown."""
    return groups.get(comm) or GroupInfo(str(comm), "", ())


def calls_waited_in(rows: ProgressTable, members: Members, gone: frozenset[int] = frozenset()) -> list[PendingCall]:
    """Return every collective in which a rank waits once, and every send and receive separately.

    Args:
        rows: progress of all ranks.
        members: members of every communicator, by number.
        gone: dead ranks. They wait in no call, and count as absent from every call.
    """
    dead = np.array(sorted(gone), np.int64)
    waiting = rows[(rows["blocked"] > 0) & ~np.isin(rows["rank"], dead)]
    single = waiting["source"] >= 0
    needed = rows[np.isin(rows["comm"], waiting["comm"])]
    pairs = needed["source"] >= 0
    return [*_collectives(waiting[~single], needed[~pairs], members, dead), *_pairs(waiting[single], needed[pairs], gone)]


def _bytes(row: ProgressTable) -> int:
    return int(row["elements"]) * int(ITEMSIZES[row["dtype"]]) if row["dtype"] < len(ITEMSIZES) else 0


def _collectives(
    waiting: ProgressTable, rows: ProgressTable, members: Members, dead: npt.NDArray[np.int64]
) -> list[PendingCall]:
    waiting = waiting[np.lexsort((waiting["rank"], waiting["blocked"], waiting["comm"]))]
    other = (np.diff(waiting["comm"]) != 0) | (np.diff(waiting["blocked"]) != 0)
    rows = rows[np.lexsort((rows["rank"], rows["comm"]))]
    found: list[PendingCall] = []
    for here in np.split(waiting, np.flatnonzero(other) + 1) if len(waiting) else []:
        comm, seq = int(here["comm"][0]), int(here["blocked"][0])
        part = rows[slice(*np.searchsorted(rows["comm"], [comm, comm + 1]).tolist())]
        entered = part[part["entered"] >= seq]  # a rank without a row has entered nothing
        there = entered["rank"]
        everyone = members.get(comm, part["rank"])
        missing = everyone[~np.isin(everyone, there) | np.isin(everyone, dead)]
        waiters = tuple(here["rank"].tolist())
        since, op = int((here if len(missing) else entered)["call_ns"].max()), Op(int(here["op"][0]))
        found.append(PendingCall(comm, seq, None, waiters, tuple(sorted(missing.tolist())), since, op, _bytes(here[0])))
    return found


def _pairs(waiting: ProgressTable, rows: ProgressTable, gone: frozenset[int]) -> list[PendingCall]:
    columns = ["comm", "source", "destination", "rank", "entered", "call_ns"]
    entered = {tuple(key): (count, at_ns) for *key, count, at_ns in rows[columns].tolist()}  # by pair and calling rank
    found = []
    columns = ["comm", "source", "destination", "rank", "blocked", "call_ns", "op"]
    for row in waiting:
        comm, source, destination, rank, seq, since, op = row[columns].tolist()
        other = destination if rank == source else source
        count, at_ns = entered.get((comm, source, destination, other), (0, 0))
        there = other not in gone and count >= seq
        since = max(since, at_ns) if there and count == seq else since
        missing = () if there or other < 0 else (other,)
        found.append(PendingCall(comm, seq, (source, destination), (rank,), missing, since, Op(op), _bytes(row)))
    return found
