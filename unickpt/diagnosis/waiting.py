"""Calls that ranks wait in, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.summaries import Summaries
from unickpt.timing.records import Op

Members = Mapping[int, npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that somebody waits in.

    Attributes:
        comm, seq: which one.
        pair: source and destination, if it is a point-to-point call.
        waiters: ranks that wait in it.
        missing: ranks that it waits for.
        since_ns: when the last of the waiters entered.
        op: what it is.
    """

    comm: int
    seq: int
    pair: tuple[int, int] | None
    waiters: tuple[int, ...]
    missing: tuple[int, ...]
    since_ns: int
    op: Op

    def named(self, names: Mapping[int, str]) -> str:
        what = f"{self.op.name.lower()} #{self.seq} of {names.get(self.comm, self.comm)}"
        return what if self.pair is None else f"{what} from rank {self.pair[0]} to rank {self.pair[1]}"


def calls_waited_in(rows: Summaries, members: Members, gone: frozenset[int] = frozenset()) -> list[Call]:
    """Every call that a rank waits in, once; of a send and its receive, each.

    Args:
        rows: of all ranks.
        members: of every communicator.
        gone: ranks that are known to be dead: they wait in nothing and enter nothing any more, whatever they have entered.
    """
    dead = np.array(sorted(gone), np.int64)
    waiting = rows[(rows["blocked"] > 0) & ~np.isin(rows["rank"], dead)]
    single = waiting["source"] >= 0
    needed = rows[np.isin(rows["comm"], waiting["comm"])]
    pairs = needed["source"] >= 0
    return [
        *_collectives(waiting[~single], needed[~pairs], members, dead),
        *_pairs(waiting[single], needed[pairs], gone),
    ]


def _collectives(waiting: Summaries, rows: Summaries, members: Members, dead: npt.NDArray[np.int64]) -> list[Call]:
    waiting = waiting[np.lexsort((waiting["rank"], waiting["blocked"], waiting["comm"]))]
    other = (np.diff(waiting["comm"]) != 0) | (np.diff(waiting["blocked"]) != 0)
    rows = rows[np.lexsort((rows["rank"], rows["comm"]))]
    found: list[Call] = []
    for here in np.split(waiting, np.flatnonzero(other) + 1) if len(waiting) else []:
        comm, seq = int(here["comm"][0]), int(here["blocked"][0])
        part = rows[slice(*np.searchsorted(rows["comm"], [comm, comm + 1]).tolist())]
        there = part["rank"][part["entered"] >= seq]  # whoever has no row has entered nothing
        everyone = members.get(comm, part["rank"])
        missing = everyone[~np.isin(everyone, there) | np.isin(everyone, dead)]
        waiters = tuple(here["rank"].tolist())
        since, op = int(here["call_ns"].max()), Op(int(here["op"][0]))
        found.append(Call(comm, seq, None, waiters, tuple(sorted(missing.tolist())), since, op))
    return found


def _pairs(waiting: Summaries, rows: Summaries, gone: frozenset[int]) -> list[Call]:
    columns = ["comm", "source", "destination", "rank", "entered"]
    entered = {tuple(key): count for *key, count in rows[columns].tolist()}  # of a pair, by the rank that has made the calls
    found = []
    columns = ["comm", "source", "destination", "rank", "blocked", "call_ns", "op"]
    for comm, source, destination, rank, seq, since, op in waiting[columns].tolist():
        other = destination if rank == source else source
        there = other not in gone and entered.get((comm, source, destination, other), 0) >= seq
        missing = () if there or other < 0 else (other,)
        found.append(Call(comm, seq, (source, destination), (rank,), missing, since, Op(op)))
    return found
