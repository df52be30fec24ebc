"""Who waits for whom at the moment of reading, a row for each call that somebody waits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.summaries import SUMMARY, summary
from unickpt.diagnosis.waiting import calls_waited_in
from unickpt.timing.processes import State
from unickpt.timing.records import Op, Phase
from unickpt.views.gathering import OP_NAMES, View, unended


@dataclass(frozen=True, slots=True)
class Waiting:
    """One call that ranks wait in now.

    Attributes:
        what: ``all_reduce #118``, of a pair with both ranks.
        group: number of its communicator.
        ranks: that wait in it.
        waited_for: ranks that it waits for; none if all have entered it.
        since_ns: when the last of them entered, on the job's clock.
    """

    what: str
    group: int
    ranks: tuple[int, ...]
    waited_for: tuple[int, ...]
    since_ns: int


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A rank that waits in no call.

    Attributes:
        rank: which one.
        doing: the state of its process, its step and phase, and the call that it made last.
        since_ns: when that ended or was made, on the job's clock; 0 if it has made none.
    """

    rank: int
    doing: str
    since_ns: int


def waiting_now(view: View) -> list[Waiting]:
    """Calls that living ranks wait in; those with most waiting ranks first."""
    rows = [
        summary(number, rank.records, _table(view, number), offset_ns=rank.to_clock_ns) for number, rank in view.ranks.items()
    ]
    members = {group.number: group.ranks for group in view.groups if len(group.ranks)}
    gone = frozenset(number for number, rank in view.ranks.items() if rank.state is State.DEAD)
    alive = {number for number, rank in view.ranks.items() if rank.alive}
    found = []
    for call in calls_waited_in(np.concatenate([np.zeros(0, SUMMARY), *rows]), members, gone):
        waiters = tuple(sorted(alive.intersection(call.waiters)))
        if waiters:
            pair = f" from rank {call.pair[0]} to rank {call.pair[1]}" if call.pair else ""
            what = f"{OP_NAMES[call.op]} #{call.seq}{pair}"
            found.append(Waiting(what, call.comm, waiters, tuple(sorted(call.missing)), call.since_ns))
    return sorted(found, key=lambda call: (-len(call.ranks), call.ranks))


def _table(view: View, number: int) -> npt.NDArray[np.int32]:
    """Numbers in the job of a rank's communicators, by their position in its own table."""
    rank = view.ranks[number]
    calls = rank.group >= 0
    own = np.zeros(int(rank.records["comm"][calls].max(initial=0)) + 1, np.int32)
    own[rank.records["comm"][calls]] = rank.group[calls]
    return own


def elsewhere(view: View, waiting: Sequence[Waiting]) -> list[Elsewhere]:
    """What the ranks do that wait in no call, by rank."""
    busy = {rank for call in waiting for rank in call.ranks}
    known = np.array([group.ends_known for group in view.groups], bool)
    found = []
    for number, rank in view.ranks.items():
        if number in busy:
            continue
        phase = Phase(rank.ring.phase).name.lower() if rank.ring.phase in list(Phase) else "unknown"
        state = "is on another host" if rank.state is State.UNKNOWN else f"is {rank.state.value}"
        doing = "ended in order" if rank.ring.closed else f"process {rank.ring.identity.pid} {state}"
        where = f"{doing}, in step {rank.ring.step}" + (f" ({phase})" if phase != "unknown" else "")
        calls = np.flatnonzero(rank.records["op"] <= Op.RECEIVE)
        if not len(calls):
            found.append(Elsewhere(number, f"{where}; has made no call", 0))
            continue
        at = int(calls[np.argmax(rank.records["call_ns"][calls])])
        last, group = rank.records[at], view.groups[rank.group[at]]
        going = bool(unended(rank, known)[at])
        which = "goes on beside it" if going else "last call"
        told = f"{where}; {which}: {OP_NAMES[int(last['op'])]} #{last['seq']} of {group.label}"
        found.append(Elsewhere(number, told, max(int(last["end_ns"]), int(last["call_ns"])) + rank.to_clock_ns))
    return found
