"""State of processes on this host, from ``/proc``."""

from __future__ import annotations

import enum
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from unickpt.base.process_identity import stat_fields

_PROC = Path("/proc")


class State(enum.Enum):
    """State of a process (``proc(5)``)."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    STUCK = "in uninterruptible sleep"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "unknown"


_BY_LETTER = {
    "R": State.RUNNING, "S": State.SLEEPING, "I": State.SLEEPING, "D": State.STUCK, "T": State.STOPPED, "t": State.STOPPED,
    "Z": State.DEAD, "X": State.DEAD,
}  # fmt: skip


def waited_ns(pid: int) -> int | None:
    """Return the time that a process's main thread has waited for a processor since its start; None if unknown.

    The second number of ``/proc/PID/schedstat`` (kernel documentation, scheduler/sched-stats).
    """
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class CpuWaitSampler:
    """Measures how long each rank's main thread waits for a processor, over so many looks."""

    def __init__(self, over: int = 5) -> None:
        self._looks: deque[tuple[int, Mapping[int, int]]] = deque(maxlen=over + 1)

    def shares(self, now_ns: int, pids: Mapping[int, int]) -> dict[int, float]:
        """Add a look.

        Args:
            now_ns: time on the monotonic clock.
            pids: process number of each living rank of this host.

        Returns:
            Fraction of time, 0 to 1, for each rank that was there at the oldest look that is kept.
        """
        waited = {rank: waited_ns(pid) for rank, pid in pids.items()}
        self._looks.append((now_ns, {rank: ns for rank, ns in waited.items() if ns is not None}))
        (then_ns, before), (_, now) = self._looks[0], self._looks[-1]
        span = now_ns - then_ns
        return {rank: min(max(ns - before[rank], 0) / span, 1.0) for rank, ns in now.items() if rank in before and span > 0}


def state_of(pid: int, *, started_before_ns: int | None = None) -> State:
    """Return the state of a process on this host.

    Args:
        pid: process number.
        started_before_ns: time on the monotonic clock. A process that started later only reuses the number: it counts as dead.
    """
    try:
        fields = stat_fields(pid)
    except FileNotFoundError:
        return State.DEAD if _PROC.is_dir() else State.UNKNOWN
    except OSError:
        return State.UNKNOWN
    if started_before_ns is not None and len(fields) > 19:
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        if since_boot_ns > started_before_ns + 1_000_000_000:
            return State.DEAD
    return _BY_LETTER.get(fields[0], State.UNKNOWN)
