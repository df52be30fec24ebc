"""Identity of a process: its number is used again after its end, so its start and the boot of its machine belong to it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.2  # where the kernel cannot tell the end of a process
_LOOK_S = 900.0  # between looks whether a process is still the same one: longer than a hang is waited for
_FIELD_START = 19  # of /proc/PID/stat, after the name: ticks since the boot


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this or another machine.

    Attributes:
        pid: number of the process in its namespace.
        start: its start in clock ticks since the boot.
        boot: ``boot_id`` of its machine.
        namespace: of process numbers; containers of one machine have different ones.
    """

    pid: int
    start: int
    boot: str
    namespace: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process on this host; None if it does not exist, or has ended."""
        found = stat_of(pid)
        return None if found is None or found[0] in "ZX" else cls(pid, found[1], boot_id(), _namespace())

    @property
    def is_near(self) -> bool:
        """Whether this process can see that one: it is, or was, on this host since its start, in the same namespace."""
        return bool(self.boot) and (self.boot, self.namespace) == (boot_id(), _namespace())

    @property
    def lives(self) -> bool:
        """Whether it runs on this host. A zombie does not."""
        return self.is_near and ProcessIdentity.of(self.pid) == self

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until it has ended, for at most so long. Return whether it has.

        Waiting reads and writes nothing: what a process reads counts as movement (``diagnosis/host/movement.py``), and a rank
        that hangs must not seem to move.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # it has ended, the kernel is older than Linux 5.3, or a sandbox forbids the call
            return self._polled(timeout_s)
        try:
            if not self.lives:  # looked at after the descriptor is open, so that it is of this process
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(None if math.isinf(timeout_s) else int(timeout_s * 1000)))
        finally:
            os.close(descriptor)

    def _polled(self, timeout_s: float) -> bool:
        """Ask for a process of this number, and seldom whether it is the same one."""
        begun_s, looked_s = time.monotonic(), -math.inf
        while _is_there(self.pid):
            now_s = time.monotonic()
            over = now_s - begun_s >= timeout_s
            if over or now_s - looked_s >= _LOOK_S:
                looked_s = now_s
                if not self.lives:
                    return True
            if over:
                return False
            time.sleep(min(begun_s + timeout_s - now_s, _POLL_S))
        return True

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}.{self.boot}.{self.namespace}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Return the identity that ``str`` wrote; None for another text."""
        with contextlib.suppress(ValueError):
            pid, start, boot, namespace = text.split(".")
            if pid.isdigit() and start.isdigit():
                return cls(int(pid), int(start), boot, namespace)
        return None


def _is_there(pid: int) -> bool:
    """Return whether there is a process of this number, perhaps a zombie, or another one than before."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def stat_of(pid: int) -> tuple[str, int] | None:
    """Return state letter and start of a process (``proc(5)``); None if it does not exist."""
    try:
        fields = stat_fields(pid)
        return fields[0], int(fields[_FIELD_START])
    except (OSError, ValueError, IndexError):
        return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name, which may contain anything. Raises OSError."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def children_of(pid: int) -> list[int]:
    """Return the living children of a process, as far as this user may see them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


@functools.cache
def boot_id() -> str:
    """Of this host (``random(4)``); '' if the system does not tell."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def environment_of(pid: int) -> frozenset[bytes]:
    """Return the variables that a process of this user has been started with, as ``NAME=value``; empty if it cannot be read."""
    try:
        return frozenset((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()
