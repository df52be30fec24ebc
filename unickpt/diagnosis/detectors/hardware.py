"""What the hardware of the hosts at fault says about a verdict.

An event counts if it was seen in the window of the verdict: from shortly before the first sign until now. Not every event that
is quoted decides something: a link of a host says nothing about a rank that computes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np

from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.diagnosis.detectors.hints import Helps, Hint, LooksAtHardware
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.hardware.events import NETWORK, SPEED, STORAGE, EventKind, HostEvent
from unickpt.diagnosis.hardware.kernel_log import OF_LIMIT
from unickpt.diagnosis.hardware.sources import DECISIVE
from unickpt.diagnosis.hardware.xids import Bearing
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.snapshot.snapshot import Snapshot

_EARLIER_NS, _LATEST_NS = 10_000_000_000, 120_000_000_000  # before the first sign: at least, at most
_STEPS = 2  # the first sign may come so many steps after the event
MOST = 6  # events of a verdict
_IN_NETWORK = (Syndrome.COMMUNICATION_HANG, Syndrome.COMMUNICATION_SLOW)
_SLOW = (Syndrome.COMMUNICATION_SLOW, Syndrome.NON_COMMUNICATION_SLOW)
_OF_PROGRAM = (Syndrome.MISMATCH, Syndrome.DEADLOCK)
_SLOWS = frozenset({EventKind.CPU_LIMIT, EventKind.CPU_HOT})  # explain a slow rank, without a fault of the host
_STOPS = frozenset({EventKind.FILE_SERVER, EventKind.BLOCKED, EventKind.LOCKUP})  # explain a rank that hangs


class Weight(enum.Enum):
    """What the hardware says about the hosts at fault."""

    UNKNOWN = "unknown"  # nothing can be read there, or what was read decides nothing
    ABSENT = "absent"  # it can be read, and tells of nothing
    PRESENT = "present"  # it has failed


def with_hardware(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Return the verdict with the events of its hosts in its window. The program alone makes mismatches and deadlocks."""
    if verdict.syndrome in _OF_PROGRAM or not snapshot.hardware:
        return verdict
    pids = _pids(verdict, snapshot)
    found = {host: _in_window(verdict, host, snapshot) for host in verdict.hosts}
    others = {one.pid for one in snapshot.ranks.values()} - pids
    events = [event for each in found.values() for event in each if _concerns(event, verdict, pids, others)]
    events.sort(key=lambda event: (not weighs(event, verdict), event.bearing is not Bearing.BROKEN, event.pid not in pids,
                                   not _explains(event, verdict, pids), -event.end_ns))  # fmt: skip
    return dataclasses.replace(verdict, hardware=tuple(_once(events))[:MOST])


def _once(events: list[HostEvent]) -> Iterator[HostEvent]:
    """Leave out the count of processes that were killed where the record of such a process is there, and equal events."""
    named = {event.kind for event in events if event.pid}
    for event in dict.fromkeys(events):
        if event.pid or event.kind is not EventKind.OUT_OF_MEMORY or event.kind not in named:
            yield event


def narrowed(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Blame a call that does not end, with no rank or link at fault, on the one host whose hardware has failed."""
    if verdict.syndrome is not Syndrome.COMMUNICATION_HANG or verdict.link is not None:
        return verdict
    broken = {
        host: found
        for host in verdict.hosts
        if (found := [event for event in _in_window(verdict, host, snapshot) if weighs(event, verdict)])
    }
    if len(broken) != 1:
        return verdict
    ((host, events),) = broken.items()
    here = [rank for rank in verdict.ranks if rank in snapshot.ranks and snapshot.ranks[rank].host == host]
    concerned = {event.pid for event in events if event.pid}
    ranks = tuple([rank for rank in here if snapshot.ranks[rank].pid in concerned] or here)
    return dataclasses.replace(verdict, ranks=ranks, hosts=(host,), confidence=1.0) if ranks else verdict


def _in_window(verdict: Verdict, host: str, snapshot: Snapshot) -> list[HostEvent]:
    steps = snapshot.steps["end_ns"] - snapshot.steps["begin_ns"]
    earlier_ns = max(_EARLIER_NS, int(_STEPS * np.median(steps))) if len(steps) else _EARLIER_NS
    begin_ns = verdict.since_ns - min(earlier_ns, _LATEST_NS)
    known = snapshot.hardware.get(host)
    return [event for event in known.events if event.overlaps(begin_ns, snapshot.now_ns)] if known is not None else []


def _pids(verdict: Verdict, snapshot: Snapshot) -> set[int]:
    ranks = {*verdict.ranks, *(rank for link in verdict.links for rank in link)}
    return {snapshot.ranks[rank].pid for rank in ranks if rank in snapshot.ranks}


def _concerns(event: HostEvent, verdict: Verdict, pids: set[int], others: set[int]) -> bool:
    """Return whether an event may concern the ranks at fault: what has happened to another rank does not.

    A process that was killed for lack of memory, and is no rank, may be a worker of the data loader of a rank that is dead.
    """
    if event.kind is EventKind.OUT_OF_MEMORY:
        dead = verdict.state is State.DEAD or verdict.syndrome is Syndrome.FAILED
        return event.pid in pids or (event.pid not in others and dead)
    if event.kind in (EventKind.BLOCKED, EventKind.LOCKUP) or event.bearing is Bearing.PROGRAM:
        return event.pid in pids or not event.pid
    return True


def weighs(event: HostEvent, verdict: Verdict) -> bool:
    """Return whether an event shows that broken hardware is the cause."""
    if event.bearing is not Bearing.BROKEN:
        return False
    if event.kind in NETWORK:
        return verdict.syndrome in _IN_NETWORK
    if event.kind in SPEED:
        return verdict.syndrome in _SLOW
    if event.kind in STORAGE:
        return verdict.cause in (Cause.DATA, Cause.CHECKPOINT) or verdict.state is State.STUCK
    return True


def _explains(event: HostEvent, verdict: Verdict, pids: set[int]) -> bool:
    """Return whether an event explains the verdict although no hardware is broken."""
    if event.kind is EventKind.OUT_OF_MEMORY:
        return verdict.state is State.DEAD or verdict.syndrome is Syndrome.FAILED
    if event.kind is EventKind.XID:
        return verdict.syndrome not in _SLOW
    if event.kind is EventKind.FILE_SERVER:
        return verdict.state is State.STUCK or verdict.cause in (Cause.DATA, Cause.CHECKPOINT)
    if event.kind in _SLOWS:
        return verdict.syndrome in _SLOW
    return event.kind in _STOPS and event.pid in pids


def weight_of(verdict: Verdict, snapshot: Snapshot) -> Weight:
    """Return what the hardware says about the hosts of a verdict.

    Without the log of the kernel and NVML it says nothing, because broken hardware shows there. So it does while something that
    is not broken hardware, such as a lack of memory, may be the cause.
    """
    if any(weighs(event, verdict) for event in verdict.hardware):
        return Weight.PRESENT
    readable = [snapshot.hardware[host].sources if host in snapshot.hardware else () for host in verdict.hosts]
    if not readable or not all(set(DECISIVE) & set(sources) for sources in readable):
        return Weight.UNKNOWN
    other = any(_explains(event, verdict, _pids(verdict, snapshot)) for event in verdict.hardware if _limited(event))
    return Weight.UNKNOWN if other else Weight.ABSENT


def _limited(event: HostEvent) -> bool:
    return event.bearing is Bearing.LIMITED


def broken_hosts(verdict: Verdict, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the hosts of a verdict whose hardware has failed."""
    return tuple(host for host in verdict.hosts if any(weighs(event, verdict) for event in _in_window(verdict, host, snapshot)))


def hardware_hint(verdict: Verdict, snapshot: Snapshot) -> Hint | None:
    """Return what to look at, if the hardware explains the verdict; None if it does not."""
    pids = _pids(verdict, snapshot)
    event = next((event for event in verdict.hardware if weighs(event, verdict) or _explains(event, verdict, pids)), None)
    if event is None or not verdict.ranks:
        return None
    if isinstance(verdict.next, Helps):
        return _helps(verdict.next, event)
    host = next((host for host in verdict.hosts if event in _in_window(verdict, host, snapshot)), verdict.hosts[0])
    return LooksAtHardware(verdict.ranks[0], host, event)


def _helps(hint: Helps, event: HostEvent) -> Helps:
    """Return what helps after an end that the hardware explains. A limit of a container stays, memory of a host may not."""
    if event.bearing is Bearing.BROKEN:
        return dataclasses.replace(hint, kind=FailureKind.DEVICE, remedy=Remedy.EVICT)
    if event.kind is EventKind.OUT_OF_MEMORY:
        stays = event.code == OF_LIMIT
        return dataclasses.replace(hint, kind=FailureKind.MEMORY, remedy=Remedy.STOP if stays else Remedy.RESTART)
    return hint
