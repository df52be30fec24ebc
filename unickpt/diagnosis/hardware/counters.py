"""Counters and states of devices, compared with their past. Pure.

A counter that rises as it always does has not changed. What counts is a rise by at least ``least`` between two readings that
is many times the usual one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from unickpt.diagnosis.hardware.events import EventKind, HostEvent

_TIMES = 10.0  # of the usual rise
_PAST_S = 300.0  # time constant of the usual rise
_LEARNS = 3  # readings before a counter that may rise all the time is judged


@dataclass(frozen=True, slots=True)
class CounterRule:
    """What a rise means.

    Attributes:
        kind: kind of the event.
        least: smallest rise between two readings. 1: any rise counts, from the first reading on.
    """

    kind: EventKind
    least: int


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter: device, its name there, and the rule for it."""

    device: str
    name: str
    rule: CounterRule


# /sys/class/infiniband/DEVICE/ports/PORT (kernel documentation, ABI/stable/sysfs-class-infiniband)
INFINIBAND = {
    "counters/link_downed": CounterRule(EventKind.LINK_DOWN, 1),
    "counters/link_error_recovery": CounterRule(EventKind.LINK_ERRORS, 1),
    "counters/symbol_error": CounterRule(EventKind.LINK_ERRORS, 50),
    "counters/port_rcv_errors": CounterRule(EventKind.LINK_ERRORS, 50),
    "counters/local_link_integrity_errors": CounterRule(EventKind.LINK_ERRORS, 10),
    "hw_counters/local_ack_timeout_err": CounterRule(EventKind.RETRANSMITS, 10),
    "hw_counters/rnr_nak_retry_err": CounterRule(EventKind.RETRANSMITS, 10),
}
# /sys/class/net/DEVICE (ABI/testing/sysfs-class-net and sysfs-class-net-statistics)
NETWORK = {
    "carrier_changes": CounterRule(EventKind.LINK_DOWN, 1),
    "statistics/rx_errors": CounterRule(EventKind.LINK_ERRORS, 20),
    "statistics/tx_errors": CounterRule(EventKind.LINK_ERRORS, 20),
    "statistics/rx_missed_errors": CounterRule(EventKind.LOST_PACKETS, 200),
    "statistics/rx_dropped": CounterRule(EventKind.LOST_PACKETS, 1000),
    "statistics/tx_dropped": CounterRule(EventKind.LOST_PACKETS, 1000),
}
OOM_KILLS = CounterRule(EventKind.OUT_OF_MEMORY, 1)
# share of the time, 0 to 1, from which a pressure counts (kernel documentation, accounting/psi)
PRESSURES = {
    ("memory", "full"): (EventKind.MEMORY_PRESSURE, 0.1),
    ("io", "full"): (EventKind.IO_PRESSURE, 0.4),
    ("cpu", "some"): (EventKind.CPU_PRESSURE, 0.7),
}
_SHARE_TIMES = 3.0  # of the usual share
CPU_LIMIT_SHARE = 0.1  # of the time in which a control group may not run


class Rises:
    """Finds rises of counters."""

    def __init__(self) -> None:
        self._before: dict[Counter, int] = {}
        self._usual: dict[Counter, float] = {}  # per second
        self._seen: dict[Counter, int] = {}

    def events(self, reading: Mapping[Counter, int], then_ns: int, now_ns: int) -> list[HostEvent]:
        """Add a reading, and return what has changed since the one before, at ``then_ns``. A counter that falls was reset."""
        seconds = max((now_ns - then_ns) / 1e9, 1e-3)
        found = []
        for counter, value in reading.items():
            rise = value - self._before.get(counter, value)
            usual = self._usual.get(counter, 0.0)
            learnt = counter.rule.least == 1 or self._seen.get(counter, 0) > _LEARNS
            if rise >= counter.rule.least and learnt and rise >= _TIMES * usual * seconds:
                found.append(HostEvent(counter.rule.kind, counter.device, then_ns, now_ns, float(rise)))
            if counter in self._before:
                self._seen[counter] = self._seen.get(counter, 0) + 1
                self._usual[counter] = usual + _part(self._seen[counter], seconds) * (max(rise, 0) / seconds - usual)
        self._before = dict(reading)
        return found


class Levels:
    """Finds links that are down or slower than they were: ``{device: speed}``, 0 for a link that is down."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def events(self, reading: Mapping[str, float], then_ns: int, now_ns: int) -> list[HostEvent]:
        """Add a reading, and return what is worse than it was at some time before."""
        found = []
        for device, speed in reading.items():
            best = self._best[device] = max(self._best.get(device, 0.0), speed)
            if speed < best:
                kind = EventKind.LINK_SLOWER if speed > 0 else EventKind.LINK_DOWN
                found.append(HostEvent(kind, device, then_ns, now_ns, speed / best if speed > 0 else 0.0))
        return found


class Shares:
    """Finds times in which processes wait for memory, storage or processors, or may not run."""

    def __init__(self) -> None:
        self._before: dict[tuple[EventKind, str], float] = {}
        self._usual: dict[tuple[EventKind, str], float] = {}
        self._seen: dict[tuple[EventKind, str], int] = {}

    def events(
        self, reading: Mapping[tuple[EventKind, str], float], least: Mapping[EventKind, float], then_ns: int, now_ns: int
    ) -> list[HostEvent]:
        """Add a reading of seconds since the boot, and return which shares are high: of a pressure, unusually high."""
        seconds = max((now_ns - then_ns) / 1e9, 1e-3)
        found = []
        for key, value in reading.items():
            kind, device = key
            share = min(max(value - self._before.get(key, value), 0.0) / seconds, 1.0)
            usual = self._usual.get(key, 0.0)
            unusual = self._seen.get(key, 0) > _LEARNS and share >= _SHARE_TIMES * usual
            if share >= least[kind] and (unusual or kind is EventKind.CPU_LIMIT):
                found.append(HostEvent(kind, device, then_ns, now_ns, share))
            if key in self._before:
                self._seen[key] = self._seen.get(key, 0) + 1
                self._usual[key] = usual + _part(self._seen[key], seconds) * (share - usual)
        self._before = dict(reading)
        return found


def _part(seen: int, seconds: float) -> float:
    """Return the weight of a reading in the usual value: the mean of all at first, that of the last minutes later."""
    return max(1 - math.exp(-seconds / _PAST_S), 1 / seen)


def parse_pressure(text: str) -> dict[str, float]:
    """Return the seconds since the boot by ``some`` and ``full``, from a file of ``/proc/pressure``."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        total = next((word.removeprefix("total=") for word in words if word.startswith("total=")), "")
        if words and total.isdigit():
            found[words[0]] = int(total) / 1e6
    return found


def parse_pairs(text: str) -> dict[str, int]:
    """Return the numbers by name, from a file with a name and a number in each line, such as ``memory.events``."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def parse_rate(text: str) -> float:
    """Return the speed in Gb/s of a port, from ``400 Gb/sec (4X NDR)``; 0 if there is none."""
    word = text.split()[0] if text.split() else ""
    try:
        return float(word)
    except ValueError:
        return 0.0


def parse_groups(text: str) -> dict[str, str]:
    """Return the paths of a process by controller ('' for version 2), from its file ``cgroup`` (``cgroups(7)``)."""
    found = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                found[controller] = fields[2]
    return found
