"""Time and status of the end of processes on this host, through ``pidfd_open(2)``, without being their parent.

The status of a process is in ``/proc`` until its parent has read it, and in its pidfd afterwards (Linux 6.15 and later).
Otherwise it is unknown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.private_files import append, read_text
from unickpt.base.process_identity import stat_fields

TOGETHER_S = 0.1  # between ends of processes of which one caused the others: launchers poll at this interval
_GET_INFO, _INFO_EXIT, _INFO_BYTES = 0xC040FF0B, 1 << 3, 64  # linux/pidfd.h
_EXIT_CODE = struct.Struct("<i")
_FIELD_EXIT_CODE = 49  # of /proc/PID/stat, after the name


ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # signals by which a process is asked to end
EXITS, _MOST_BYTES = "exits.jsonl", 1 << 20  # beside the rings: the rings alone do not show who ended first, and by itself


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Status that a process ended with (``wait(2)``).

    Attributes:
        signal: number of the signal that killed it, 0 if it exited.
        code: exit code, 0 to 255.
    """

    signal: int = 0
    code: int = 0

    @classmethod
    def of(cls, returncode: int) -> ExitStatus:
        """Return the status that ``Popen.returncode`` stands for: the number of a signal is negative there."""
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    @property
    def sound(self) -> bool:
        """Whether the process exited with code 0."""
        return not self.signal and not self.code

    @property
    def asked(self) -> bool:
        """Whether the process was asked to end: by a signal, or it says so by the exit code that a shell shows for one."""
        return (self.signal or self.code - 128) in ASKED

    @property
    def signal_name(self) -> str:
        """``SIGKILL``; '' if the process exited."""
        try:
            return signal.Signals(self.signal).name if self.signal else ""
        except ValueError:
            return f"signal {self.signal}"


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """End of a process.

    Attributes:
        at_ns: time on the monotonic clock.
        status: None if unknown.
    """

    at_ns: int
    status: ExitStatus | None


class ExitWatcher:
    """Watches processes. ``sleep`` belongs to one thread, ``collect`` to any.

    Attributes:
        known: end of each watched process that has ended, by process number.
    """

    def __init__(self) -> None:
        self.known: dict[int, ProcessExit] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def watch(self, pids: Iterable[int]) -> None:
        """Watch further processes, which are alive."""
        with self._lock:
            for pid in pids:
                if pid not in self._open:
                    with contextlib.suppress(OSError, AttributeError):  # it has ended, or the kernel is older than 5.3
                        self._open[pid] = os.pidfd_open(pid)
                        self.known.pop(pid, None)

    def sleep(self, seconds: float) -> None:
        """Sleep, but at most until a process has ended and those that end with it have, too."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._open:
                time.sleep(left)
            elif _ready(self._open, left) and self.collect():
                end = min(end, time.monotonic() + 2 * TOGETHER_S)

    def collect(self) -> bool:
        """Take note of the watched processes that have ended since the last look; return whether there are any."""
        with self._lock:
            ended = _ready(self._open, 0.0)
            now = time.monotonic_ns()
            for pid in ended:
                self.known[pid] = ProcessExit(now, _status(pid, self._open[pid]))
                os.close(self._open.pop(pid))
            return bool(ended)

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


def _ready(watched: Mapping[int, int], seconds: float) -> list[int]:
    """Wait at most this long for a process to end; return those that have."""
    watched = dict(watched)
    poll = select.poll()
    for descriptor in watched.values():
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [pid for pid, descriptor in watched.items() if descriptor in ready]


def _status(pid: int, descriptor: int) -> ExitStatus | None:
    status = _of_zombie(pid)
    if status is None:
        status = _of_reaped(descriptor)
    return None if status is None else ExitStatus(status & 0x7F, status >> 8 & 0xFF)


def _of_zombie(pid: int) -> int | None:
    try:
        fields = stat_fields(pid)
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


# ---------------------------------------------------------------- the file that the agent of the host writes


def append_exits(folder: Path, exits: Mapping[int, ProcessExit]) -> None:
    """Add a line for each process.

    Args:
        folder: folder of the rings.
        exits: end of each process, by process number. Times are on the monotonic clock of this boot.

    Raises:
        OSError: the file cannot be written.
    """
    lines = []
    for pid, end in exits.items():
        status = None if end.status is None else [end.status.signal, end.status.code]
        lines.append(json.dumps({"pid": pid, "at_ns": end.at_ns, "status": status}))
    if lines:
        append(folder / EXITS, "".join(f"{line}\n" for line in lines).encode())


def read_exits(folder: Path) -> dict[int, ProcessExit]:
    """Return the newest end of each process number; invalid lines are left out, and a missing file has none."""
    found: dict[int, ProcessExit] = {}
    for line in read_text(folder / EXITS, _MOST_BYTES).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            entry = json.loads(line)
            status = None if entry["status"] is None else ExitStatus(*map(int, entry["status"]))
            found[int(entry["pid"])] = ProcessExit(int(entry["at_ns"]), status)
    return found
