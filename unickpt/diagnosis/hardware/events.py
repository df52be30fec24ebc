"""What has happened on a host, as values. ``unickpt.diagnosis.reports.hardware_text`` renders them as text."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from unickpt.diagnosis.hardware.xids import Bearing, xid

MOST_EVENTS = 64  # of a host that are kept
KEPT_NS = 900 * 1_000_000_000  # for which an event is kept


class EventKind(enum.Enum):
    """Kind of an event."""

    XID = "Xid"
    SWITCH = "SXid"
    GPU_LOST = "lost GPU"
    GPU_SILENT = "silent GPU driver"
    GPU_MEMORY = "uncorrectable GPU memory error"
    GPU_HOT = "hot GPU"
    GPU_POWER = "GPU power"
    NVLINK = "NVLink errors"
    MACHINE_CHECK = "machine check"
    MEMORY = "uncorrectable memory error"
    PCIE = "PCIe error"
    CPU_HOT = "hot processor"
    LOCKUP = "processor locked up"
    OUT_OF_MEMORY = "out of memory"
    BLOCKED = "blocked in the kernel"
    DISK = "disk error"
    FILE_SYSTEM = "file system error"
    FILE_SERVER = "silent file server"
    LINK_DOWN = "link down"
    LINK_SLOWER = "slower link"
    LINK_ERRORS = "link errors"
    NETWORK_CARD = "network card error"
    RETRANSMITS = "retransmits"
    LOST_PACKETS = "lost packets"
    MEMORY_PRESSURE = "memory pressure"
    IO_PRESSURE = "storage pressure"
    CPU_PRESSURE = "processor pressure"
    CPU_LIMIT = "processor limit"
    CLOCK_SET = "clock set"
    CLOCK_APART = "clock apart"


_BROKEN = frozenset(
    {
        EventKind.SWITCH, EventKind.GPU_LOST, EventKind.GPU_MEMORY, EventKind.GPU_HOT, EventKind.GPU_POWER, EventKind.NVLINK,
        EventKind.MACHINE_CHECK, EventKind.MEMORY, EventKind.PCIE, EventKind.DISK, EventKind.FILE_SYSTEM, EventKind.LINK_DOWN,
        EventKind.LINK_SLOWER, EventKind.LINK_ERRORS, EventKind.NETWORK_CARD,
    }
)  # fmt: skip
NETWORK = frozenset({EventKind.LINK_DOWN, EventKind.LINK_SLOWER, EventKind.LINK_ERRORS, EventKind.NETWORK_CARD})
STORAGE = frozenset({EventKind.DISK, EventKind.FILE_SYSTEM})
SPEED = frozenset({EventKind.GPU_HOT, EventKind.GPU_POWER})  # slow a device down, and stop nothing
_HIGHEST = frozenset(  # their amount is a level; of the others it is a count
    {
        EventKind.GPU_HOT, EventKind.GPU_POWER, EventKind.MEMORY_PRESSURE, EventKind.IO_PRESSURE, EventKind.CPU_PRESSURE,
        EventKind.CPU_LIMIT, EventKind.LINK_SLOWER, EventKind.OUT_OF_MEMORY, EventKind.BLOCKED, EventKind.LOCKUP,
        EventKind.GPU_SILENT, EventKind.CLOCK_APART,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Something that has happened on a host, or goes on.

    Attributes:
        kind: kind.
        device: device, port, container or server; '' if there is none.
        begin_ns: begin, on the wall clock of the host.
        end_ns: last time at which it was seen.
        amount: count of errors; bytes of a process that was killed for lack of memory; share of the time of a pressure or a
            limit, 0 to 1; degrees Celsius of a hot device; seconds of a process that is blocked, of a set clock, and by
            which a clock is ahead of those of other hosts.
        code: number of an Xid or SXid.
        pid: process that it concerns, 0 if unknown.
        name: name of that process.
    """

    kind: EventKind
    device: str
    begin_ns: int
    end_ns: int
    amount: float = 1.0
    code: int = 0
    pid: int = 0
    name: str = ""

    @property
    def bearing(self) -> Bearing:
        """What it says about the host."""
        if self.kind is EventKind.XID:
            return xid(self.code).bearing
        return Bearing.BROKEN if self.kind in _BROKEN else Bearing.LIMITED

    def moved(self, offset_ns: int) -> HostEvent:
        """Return the event on another clock."""
        return dataclasses.replace(self, begin_ns=self.begin_ns + offset_ns, end_ns=self.end_ns + offset_ns)

    def overlaps(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether it was seen in a window."""
        return self.begin_ns <= end_ns and self.end_ns >= begin_ns


@dataclass(frozen=True, slots=True)
class HostHardware:
    """What a host says of its hardware.

    Attributes:
        sources: names of the sources that can be read (``sources.py``).
        events: newest events.
    """

    sources: tuple[str, ...] = ()
    events: tuple[HostEvent, ...] = ()

    def moved(self, offset_ns: int) -> HostHardware:
        """Return the same on another clock."""
        return HostHardware(self.sources, tuple(event.moved(offset_ns) for event in self.events))


class EventLog:
    """Newest events of a host. What goes on is one event, not one for each reading."""

    def __init__(self) -> None:
        self._events: list[HostEvent] = []

    def add(self, event: HostEvent, *, within_ns: int = 0) -> None:
        """Add an event. It goes on an earlier one of the same thing that has ended at most ``within_ns`` before it."""
        for at, known in enumerate(self._events):
            if _same(known, event) and event.begin_ns <= known.end_ns + within_ns and known.begin_ns <= event.end_ns:
                amount = max(known.amount, event.amount) if event.kind in _HIGHEST else known.amount + event.amount
                begin_ns, end_ns = min(known.begin_ns, event.begin_ns), max(known.end_ns, event.end_ns)
                self._events[at] = dataclasses.replace(known, begin_ns=begin_ns, end_ns=end_ns, amount=amount)
                return
        self._events.append(event)

    def newest(self, now_ns: int) -> tuple[HostEvent, ...]:
        """Return the events of the last minutes, and forget the others. Of many, what is broken stays longest."""
        fresh = [event for event in self._events if event.end_ns > now_ns - KEPT_NS]
        if len(fresh) > MOST_EVENTS:
            fresh = sorted(fresh, key=lambda event: (event.bearing is Bearing.BROKEN, event.end_ns))[-MOST_EVENTS:]
        self._events = sorted(fresh, key=lambda event: event.begin_ns)
        return tuple(self._events)


def _same(one: HostEvent, other: HostEvent) -> bool:
    return (one.kind, one.device, one.code, one.pid, one.name) == (other.kind, other.device, other.code, other.pid, other.name)


def of_job(
    events: Iterable[HostEvent], pids: Sequence[int], groups: Sequence[str], *, same_numbers: bool
) -> Iterator[HostEvent]:
    """Yield the events that may concern the processes of a job. Those about a process of another job do not.

    Args:
        events: events of their host.
        pids: numbers of the processes of the job's ranks.
        groups: control groups of these processes, as the kernel names them.
        same_numbers: whether the kernel's log has the same numbers of processes: not in a container.
    """
    for event in events:
        mine = event.pid in pids and same_numbers
        match event.kind:
            case EventKind.OUT_OF_MEMORY:
                if mine or not event.pid or (event.device in groups and event.device not in ("", "/")):
                    yield event
            case EventKind.BLOCKED | EventKind.LOCKUP:
                if mine:
                    yield event
            case EventKind.XID if event.bearing is Bearing.PROGRAM:
                if mine or not event.pid or not same_numbers:
                    yield event
            case _:
                yield event
