"""State of processes on this host, from ``/proc``."""

from __future__ import annotations

import enum
import os
from pathlib import Path

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


def state_of(pid: int, *, started_before_ns: int | None = None) -> State:
    """Return the state of a process on this host.

    Args:
        pid: process number.
        started_before_ns: time on the monotonic clock. A process that started later only reuses the number: it counts as dead.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return State.DEAD if _PROC.is_dir() else State.UNKNOWN
    except OSError:
        return State.UNKNOWN
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    if started_before_ns is not None and len(fields) > 19:
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        if since_boot_ns > started_before_ns + 1_000_000_000:
            return State.DEAD
    return _BY_LETTER.get(fields[0], State.UNKNOWN)
