"""Calls that wait for ranks that have ended in order: they never end, so no deadline is needed.

Either the waiting ranks make a call too many, such as a barrier that only rank 0 makes, or the others have ended early. Where
one side is smaller, it is at fault. Otherwise the order of the calls decides: a call that comes where it came before is right.
"""

from __future__ import annotations

from unickpt.diagnosis.detectors.call_order import CallOrder
from unickpt.diagnosis.detectors.hints import EndedEarly, OneCallMore
from unickpt.diagnosis.detectors.observations import CallAlone
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import Groups, Members, calls_waited_in
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.snapshot.progress import ProgressTable
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot

ENDING_NS = 2_000_000_000  # from the end of recording to the status of a process, which may still show a fault


def calls_of_ended(rows: ProgressTable, members: Members, groups: Groups, snapshot: Snapshot) -> list[Verdict]:
    """Return verdicts on calls that wait only for ranks that have ended in order.

    Args:
        rows: progress of all ranks.
        members: members of every communicator.
        groups: communicators by number.
        snapshot: the job.
    """
    over = ended_ranks(snapshot)
    if not over or len(over) == len(snapshot.ranks):
        return []
    order = CallOrder(snapshot.calls)
    found = []
    for call in calls_waited_in(rows, members):
        waiters = tuple(rank for rank in call.waiters if _waits(snapshot.ranks.get(rank)))
        if not waiters or not call.missing or not over.issuperset(call.missing):
            continue
        ref = call.ref(groups)
        alone = len(waiters) < len(call.missing) or (
            len(waiters) == len(call.missing) and not order.comes_as_before(waiters[0], call.comm, call.seq)
        )
        hint = OneCallMore(waiters, ref, call.missing) if alone else EndedEarly(call.missing, ref, waiters)
        found.append(
            Verdict(
                Syndrome.MISMATCH, hint.ranks, call.since_ns, ref.group, ref.op, ref.seq, call.bytes, victims=len(waiters),
                evidence=(CallAlone(ref, waiters, call.missing),), next=hint,
            )
        )  # fmt: skip
    return sorted(found, key=lambda verdict: -verdict.victims)[:1]


def ended_ranks(snapshot: Snapshot) -> frozenset[int]:
    """Return the ranks that make no further call, without a known fault."""
    return frozenset(rank for rank, one in snapshot.ranks.items() if _over(one, snapshot.now_ns))


def ends_now(snapshot: Snapshot) -> bool:
    """Return whether a rank has just made its last call, and how its process ends is not known yet."""
    return any(one.ended_in_order and not _over(one, snapshot.now_ns) for one in snapshot.ranks.values())


def _over(one: RankSnapshot, now_ns: int) -> bool:
    if not one.ended_in_order:
        return False
    return (one.exit is not None and one.exit.sound) or now_ns - one.heard_ns > ENDING_NS


def _waits(one: RankSnapshot | None) -> bool:
    """Return whether a rank waits, or has ended because its call failed when the others had ended."""
    return one is not None and (one.failed or one.raised or (one.state is not State.DEAD and not one.closed))
