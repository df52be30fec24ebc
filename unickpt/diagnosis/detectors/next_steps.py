"""What to look at, where the records show it: a hint for a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unickpt.diagnosis.detectors.call_order import CallOrder
from unickpt.diagnosis.detectors.hints import (
    CollectTogether,
    Hint,
    LooksAtNetwork,
    LooksAtProcess,
    Matter,
    OffTrack,
    OtherOrder,
    SameSideFirst,
)
from unickpt.diagnosis.detectors.observations import (
    CallRef,
    CallVariant,
    CircularWait,
    CpuStarvation,
    DownMember,
    Exited,
    LongStepsNowAndThen,
    NotBegun,
    RotatingPauses,
)
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.snapshot.snapshot import Snapshot

_KILLED = "SIGKILL"
_BY_CAUSE = {Cause.DATA: Matter.NO_DATA, Cause.CHECKPOINT: Matter.SAVES}


def hint_of(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    """Return what to look at; None if nothing is known of the ranks."""
    if verdict.next is not None:
        return verdict.next
    match verdict.syndrome:
        case Syndrome.MISMATCH:
            return _of_mismatch(verdict, snapshot) or OtherOrder(verdict.ranks)
        case Syndrome.DEADLOCK:
            return _of_deadlock(verdict, snapshot) or OtherOrder(verdict.ranks)
        case Syndrome.NON_COMMUNICATION_HANG:
            return _of_process(verdict, snapshot)
        case Syndrome.NON_COMMUNICATION_SLOW:
            return _of_slow(verdict, snapshot)
        case Syndrome.COMMUNICATION_HANG | Syndrome.COMMUNICATION_SLOW:
            return LooksAtNetwork(verdict.hosts, verdict.link, slow=verdict.syndrome is Syndrome.COMMUNICATION_SLOW)
        case Syndrome.FAILED:
            return None


def _of_mismatch(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    variants = [item for item in verdict.evidence if isinstance(item, CallVariant)]
    if len(variants) < 2 or verdict.group is None:
        return None
    sides = [(item.ranks, CallRef(item.op, verdict.seq, verdict.group)) for item in variants[:2]]
    return _off_track(sides, verdict.ranks, snapshot)


def _of_deadlock(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    item = next((item for item in verdict.evidence if isinstance(item, CircularWait)), None)
    if item is None or item.opposite is None:
        return None
    here, there = item.call, item.opposite
    if here.pair is not None and there.pair is not None:
        ranks = tuple(sorted({*item.waiters, *item.awaited}))
        return SameSideFirst(ranks, here.op) if here.op is there.op else None
    if here.pair is not None or there.pair is not None:
        return None
    return _off_track([(item.awaited, there), (item.waiters, here)], verdict.ranks, snapshot)


def _off_track(
    sides: Sequence[tuple[tuple[int, ...], CallRef]], at_fault: tuple[int, ...], snapshot: Snapshot
) -> OffTrack | None:
    """Return which side has left the common order of the calls. Without earlier steps like this one, the side at fault."""
    order = CallOrder(snapshot.calls)
    placed = [(ranks, call, (snapshot.comm_of(call.group.name), call.seq)) for ranks, call in sides if ranks]
    if len(placed) < 2:
        return None
    found = []
    for (ranks, call, own), (others, usual, other) in (placed, placed[::-1]):
        as_before, left_out = order.left_out(ranks[0], own, others[0], other)
        found.append(OffTrack(ranks, call, others, usual, left_out, as_before))
    sure = [hint for hint in found if hint.as_before]
    if len(sure) == 1:
        return _counted(sure[0], order, snapshot)
    blamed = [hint for hint in found if set(hint.ranks) <= set(at_fault) and not set(hint.others) <= set(at_fault)]
    return _counted(blamed[0], order, snapshot) if blamed else None


def _counted(hint: OffTrack, order: CallOrder, snapshot: Snapshot) -> OffTrack:
    """Return the hint with how often both sides have made the usual call, if that shows calls that are left out.

    A call of a kind that the group has not made before may be one too many, or one to which all come later.
    """
    if order.is_new(snapshot.comm_of(hint.call.group.name), hint.call.op, hint.call.seq):
        hint = dataclasses.replace(hint, alone=True)
    usual = snapshot.comm_of(hint.usual.group.name), hint.usual.op
    found = order.made(hint.ranks[0], hint.others[0], *usual, snapshot.steps)
    if found is None or found.made >= found.of:
        return hint
    return dataclasses.replace(hint, made=found.made, of=found.of, since_step=found.since_step)


def _of_process(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    for item in verdict.evidence:
        if isinstance(item, NotBegun):
            return LooksAtProcess(item.rank, item.pid, item.host, Matter.NOT_BEGUN)
        if isinstance(item, Exited | DownMember) and item.status is not None:
            return _at(item.rank, snapshot, Matter.KILLED if _was_killed(item.status) else Matter.FAILED)
    one = snapshot.ranks.get(verdict.ranks[0]) if verdict.ranks else None
    if one is None:
        return None
    by_state = {State.STOPPED: Matter.STOPPED, State.STUCK: Matter.STUCK}
    if one.state is State.DEAD or one.failure is not None:
        return _at(verdict.ranks[0], snapshot, Matter.KILLED if _was_killed(one.exit) else Matter.FAILED)
    by_cause = _BY_CAUSE.get(verdict.cause, Matter.BUSY) if verdict.cause is not None else Matter.BUSY
    return _at(verdict.ranks[0], snapshot, by_state.get(one.state, by_cause))


def _was_killed(status: ExitStatus | None) -> bool:
    return status is not None and status.signal_name == _KILLED


def _of_slow(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    in_turn = any(isinstance(item, RotatingPauses) for item in verdict.evidence)
    if verdict.cause is Cause.GARBAGE or in_turn:
        return CollectTogether(verdict.ranks)
    if any(isinstance(item, CpuStarvation) for item in verdict.evidence):
        return _at(verdict.ranks[0], snapshot, Matter.STARVED)
    if verdict.cause is Cause.DATA:
        return _at(verdict.ranks[0], snapshot, Matter.NO_DATA)
    late = any(isinstance(item, LongStepsNowAndThen) for item in verdict.evidence)
    return _at(verdict.ranks[0], snapshot, Matter.LATE if late else Matter.SLOW)


def _at(rank: int, snapshot: Snapshot, matter: Matter) -> LooksAtProcess | None:
    one = snapshot.ranks.get(rank)
    return None if one is None else LooksAtProcess(rank, one.pid, one.host, matter)
