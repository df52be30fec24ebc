"""Current waits: a row for each call in which a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.waits import calls_waited_in
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords, unended
from unickpt.diagnosis.snapshot.progress import PROGRESS, rank_progress


@dataclass(frozen=True, slots=True)
class WaitRow:
    """One call that ranks wait in now.

    Attributes:
        what: text, such as ``all_reduce #118``; with both ranks for a pair.
        group: number of its communicator.
        ranks: waiting ranks.
        waited_for: ranks that the call waits for; empty if all have entered it.
        since_ns: time at which the last waiting rank entered, on the job's clock.
    """

    what: str
    group: int
    ranks: tuple[int, ...]
    waited_for: tuple[int, ...]
    since_ns: int


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Activity of a rank that waits in no call.

    Attributes:
        rank: global rank.
        doing: text with process state, step, phase and last call.
        since_ns: end or begin of that call, on the job's clock; 0 without a call.
    """

    rank: int
    doing: str
    since_ns: int


def wait_rows(job: JobRecords) -> list[WaitRow]:
    """Return the calls in which living ranks wait, those with most ranks first."""
    rows = [
        rank_progress(number, rank.records, _table(job, number), offset_ns=rank.to_clock_ns)
        for number, rank in job.ranks.items()
    ]
    members = {group.number: group.ranks for group in job.groups if len(group.ranks)}
    gone = frozenset(number for number, rank in job.ranks.items() if rank.state is State.DEAD)
    alive = {number for number, rank in job.ranks.items() if rank.alive}
    found = []
    for call in calls_waited_in(np.concatenate([np.zeros(0, PROGRESS), *rows]), members, gone):
        waiters = tuple(sorted(alive.intersection(call.waiters)))
        if waiters:
            pair = f" from rank {call.pair[0]} to rank {call.pair[1]}" if call.pair else ""
            what = f"{OP_NAMES[call.op]} #{call.seq}{pair}"
            found.append(WaitRow(what, call.comm, waiters, tuple(sorted(call.missing)), call.since_ns))
    return sorted(found, key=lambda call: (-len(call.ranks), call.ranks))


def _table(job: JobRecords, number: int) -> npt.NDArray[np.int32]:
    """Return the number in the job of each communicator in a rank's table."""
    rank = job.ranks[number]
    calls = rank.group >= 0
    own = np.zeros(int(rank.records["comm"][calls].max(initial=0)) + 1, np.int32)
    own[rank.records["comm"][calls]] = rank.group[calls]
    return own


def rank_activities(job: JobRecords, waiting: Sequence[WaitRow]) -> list[RankActivity]:
    """Return the activity of ranks that wait in no call, by rank."""
    busy = {rank for call in waiting for rank in call.ranks}
    known = np.array([group.ends_known for group in job.groups], bool)
    found = []
    for number, rank in job.ranks.items():
        if number in busy:
            continue
        phase = Phase(rank.ring.phase).name.lower() if rank.ring.phase in list(Phase) else "unknown"
        state = "is on another host" if rank.state is State.UNKNOWN else f"is {rank.state.value}"
        doing = "ended in order" if rank.ring.closed else f"process {rank.ring.identity.pid} {state}"
        where = f"{doing}, in step {rank.ring.step}" + (f" ({phase})" if phase != "unknown" else "")
        calls = np.flatnonzero(rank.records["op"] <= Op.RECEIVE)
        if not len(calls):
            found.append(RankActivity(number, f"{where}; has made no call", 0))
            continue
        at = int(calls[np.argmax(rank.records["call_ns"][calls])])
        last, group = rank.records[at], job.groups[rank.group[at]]
        going = bool(unended(rank, known)[at])
        which = "goes on beside it" if going else "last call"
        activity = f"{where}; {which}: {OP_NAMES[int(last['op'])]} #{last['seq']} of {group.label}"
        found.append(RankActivity(number, activity, max(int(last["end_ns"]), int(last["call_ns"])) + rank.to_clock_ns))
    return found
