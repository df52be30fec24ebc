"""Where the ranks of a verdict are: at fault, and waiting."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from unickpt.diagnosis.detectors.observations import CallAlone, CallVariant, CircularWait, Unfinished
from unickpt.diagnosis.detectors.verdicts import RankPlaces, Syndrome, Verdict
from unickpt.diagnosis.host.stack_dumps import Frame, place_of
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import Snapshot

SLOW = (Syndrome.COMMUNICATION_SLOW, Syndrome.NON_COMMUNICATION_SLOW)
_IN_PROCESS = (Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW, Syndrome.FAILED)
OF_A_CALL, MOST = 4, 16  # ranks that are asked where they wait: of one call, and in all


def waiting_ranks(verdict: Verdict, snapshot: Snapshot) -> tuple[int, ...]:
    """Return some of the ranks in the calls of a verdict, without those at fault."""
    sets = [_of(ranks, verdict) for ranks in _named(verdict)] or [_of(_entered(verdict, snapshot), verdict)]
    return tuple(sorted({rank for ranks in sets for rank in ranks[:OF_A_CALL]})[:MOST])


def hosts_of(verdict: Verdict, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the hosts of the ranks at fault, or of the two ends of a link at fault, each once."""
    known = {rank: one.host for rank, one in snapshot.absent.items()}
    known |= {rank: one.host for rank, one in snapshot.ranks.items()}
    in_network = verdict.syndrome in (Syndrome.COMMUNICATION_HANG, Syndrome.COMMUNICATION_SLOW)
    ranks = verdict.link if verdict.link is not None and in_network else verdict.ranks
    return tuple(dict.fromkeys(known[rank] for rank in ranks if rank in known))


def _of(ranks: Iterable[int], verdict: Verdict) -> list[int]:
    return sorted(set(ranks) - set(verdict.ranks))


def _named(verdict: Verdict) -> Iterator[tuple[int, ...]]:
    for item in verdict.evidence:
        match item:
            case CircularWait(_, waiters, awaited, _):
                yield from (waiters, awaited)
            case CallVariant(ranks=ranks) | Unfinished(waiters=ranks) | CallAlone(waiters=ranks):
                yield ranks


def _entered(verdict: Verdict, snapshot: Snapshot) -> list[int]:
    """Return the ranks that have entered the call of a verdict and nothing after it."""
    if verdict.group is None:
        return []
    rows = snapshot.rows
    comm = snapshot.comm_of(verdict.group.name)
    here = (rows["comm"] == comm) & (rows["entered"] == np.uint64(verdict.seq))
    if verdict.op in (Op.SEND, Op.RECEIVE) and verdict.link is not None:
        here &= (rows["source"] == verdict.link[0]) & (rows["destination"] == verdict.link[1])
    else:
        here &= rows["source"] < 0
    found: list[int] = rows["rank"][here].tolist()
    return found


def gone_on(verdict: Verdict, snapshot: Snapshot) -> tuple[int, ...]:
    """Return the ranks at fault that have got through a mismatched call, as happens when only shapes differ."""
    if verdict.syndrome is not Syndrome.MISMATCH or verdict.group is None:
        return ()
    rows = snapshot.rows
    comm = snapshot.comm_of(verdict.group.name)
    over = (rows["comm"] == comm) & (rows["source"] < 0) & (rows["ended"] >= np.uint64(verdict.seq))
    return tuple(sorted(set(rows["rank"][over].tolist()) & set(verdict.ranks)))


def with_places(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Return the verdict with all known places, and the state of the first rank at fault if the fault is in its process."""
    places = (*ranks_at(verdict.ranks, snapshot, waiting=False), *ranks_at(verdict.waiting, snapshot, waiting=True))
    first = snapshot.ranks.get(verdict.ranks[0]) if verdict.ranks else None
    absent = snapshot.absent.get(verdict.ranks[0]) if verdict.ranks else None
    known = first or absent
    at = place_of(known.stack) if known is not None else None
    state = first.state if first is not None else absent.state if absent is not None else None
    in_process = verdict.syndrome in _IN_PROCESS
    return dataclasses.replace(verdict, state=state if in_process else None, at=at, places=places)


def ranks_at(ranks: Sequence[int], snapshot: Snapshot, *, waiting: bool) -> list[RankPlaces]:
    """Return where ranks are, those in one place together; of many, the first ones. ``waiting``: whether they only wait,
    of which only a line of the user's own code tells something."""
    found: dict[Frame, list[int]] = defaultdict(list)
    for rank in ranks[:MOST]:
        one = snapshot.ranks.get(rank) or snapshot.absent.get(rank)
        frame = place_of(one.stack) if one is not None else None
        if frame is not None and (frame.own or not waiting):
            found[frame].append(rank)
    return [RankPlaces(frame, tuple(ranks), waiting) for frame, ranks in found.items()]
