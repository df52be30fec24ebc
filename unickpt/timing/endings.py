"""How processes of this host ended: when, and by what. Seen through ``pidfd_open(2)``, so that nobody has to be their parent.

What a process ended with is in ``/proc`` until its parent has asked for it, and in its pidfd afterwards (Linux 6.15 and later).
Where neither tells, it is not known.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOGETHER_S = 0.1  # between the ends of processes of which one has brought about the others: launchers look that often
_PROC = Path("/proc")
_GET_INFO, _INFO_EXIT, _INFO_BYTES = 0xC040FF0B, 1 << 3, 64  # linux/pidfd.h
_EXIT_CODE = struct.Struct("<i")
_FIELD_EXIT_CODE = 49  # of /proc/PID/stat, after the name


@dataclass(frozen=True, slots=True)
class Ending:
    """Of a process.

    Attributes:
        at_ns: of the monotonic clock.
        how: ``SIGKILL``, ``exit code 1``; '' if that is not known.
    """

    at_ns: int
    how: str


class Endings:
    """Watches processes from when it is told of them.

    Attributes:
        known: process -> how it ended, of those that have.
    """

    def __init__(self) -> None:
        self.known: dict[int, Ending] = {}
        self._open: dict[int, int] = {}

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these processes, too; they are alive."""
        for pid in pids:
            if pid not in self._open:
                with contextlib.suppress(
                    OSError, AttributeError
                ):  # it has just ended; a kernel before 5.3, or none that is Linux
                    self._open[pid] = os.pidfd_open(pid)
                    self.known.pop(pid, None)

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until one has ended and those that end with it have, too."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._open:
                time.sleep(left)
            elif self._collect(left):
                end = min(end, time.monotonic() + 2 * TOGETHER_S)

    def close(self) -> None:
        """Watch none any more."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _collect(self, seconds: float) -> bool:
        """Wait so long for one of them to end."""
        poll = select.poll()
        for descriptor in self._open.values():
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        now = time.monotonic_ns()
        for pid, descriptor in list(self._open.items()):
            if descriptor in ready:
                self.known[pid] = Ending(now, _how(pid, descriptor))
                os.close(self._open.pop(pid))
        return bool(ready)


def _how(pid: int, descriptor: int) -> str:
    status = _of_zombie(pid)
    if status is None:
        status = _of_reaped(descriptor)
    if status is None:
        return ""
    number = status & 0x7F
    if not number:
        return f"exit code {status >> 8 & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_zombie(pid: int) -> int | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[_FIELD_EXIT_CODE]) if fields[0] in "ZX" and len(fields) > _FIELD_EXIT_CODE else None


def _of_reaped(descriptor: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    (given,) = struct.unpack_from("<Q", info, 0)
    return int(_EXIT_CODE.unpack_from(info, _INFO_BYTES - _EXIT_CODE.size)[0]) if given & _INFO_EXIT else None
