"""Which ranks of a job have ended, so that the other ranks do not wait for their messages until the time limit.

A process that ends in order says so in the store of the job. One that is killed is missed by the ranks on its host, which look
for its process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

_SAY_S = 2.0  # limit for the last message of a process, whose store may be gone
_PROC = Path("/proc")


class Ends:
    """The ranks that have ended. A call never raises.

    Args:
        store: key-value store of the job, which can append (torch's ``TCPStore``). With another one, no end is seen.
        rank: rank of this process.
        prefix: prefix of all keys.
    """

    def __init__(self, store: Any, *, rank: int, prefix: str) -> None:
        self._store, self._rank, self._process = store, rank, os.getpid()
        self._ended, self._here = f"{prefix}/ended", f"{prefix}/processes/{_host()}"
        self._beside: dict[int, tuple[int, str]] = {}  # rank -> process, of this host
        with contextlib.suppress(Exception):
            store.append(self._here, f"{rank} {self._process} {_begin_of(self._process)}\n")
            atexit.register(self._say)  # after the saves of this process: they are waited for before

    def __call__(self) -> frozenset[int]:
        """Return the ranks that have ended, as far as this process knows."""
        with contextlib.suppress(Exception):
            return frozenset((*self._said(), *self._killed()))
        return frozenset()

    def _said(self) -> list[int]:
        return [int(word) for word in self._read(self._ended).split()]

    def _killed(self) -> list[int]:
        for line in self._read(self._here).splitlines():
            rank, process, begin = line.split(" ")
            self._beside[int(rank)] = int(process), begin
        return [rank for rank, (process, begin) in self._beside.items() if begin and _begin_of(process) != begin]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _say(self) -> None:
        if os.getpid() != self._process:  # a forked child
            return
        with contextlib.suppress(Exception):
            said = threading.Thread(target=self._write, name="unickpt-end", daemon=True)
            said.start()
            said.join(_SAY_S)

    def _write(self) -> None:
        with contextlib.suppress(Exception):
            self._store.append(self._ended, f"{self._rank} ")


def _host() -> str:
    """Return what all processes that see each other's numbers have in common."""
    with contextlib.suppress(OSError):
        return f"{(_PROC / 'sys/kernel/random/boot_id').read_text().strip()}-{os.readlink(_PROC / 'self/ns/pid')}"
    return ""


def _begin_of(process: int) -> str:
    """Return when a process began, in ticks; '' if it does not run, or its number cannot be looked up."""
    with contextlib.suppress(OSError, IndexError):
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
