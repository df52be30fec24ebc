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

from unickpt.base.process_identity import boot_id

_SAY_S = 2.0  # limit for the last message of a process, whose store may be gone
_PROC = Path("/proc")
_BEGUN, _ENDED = "begun", "ended"


class Ends:
    """The ranks that have ended. A call never raises.

    Args:
        store: key-value store of the job, which can append (torch's ``TCPStore``). With another one, no end is seen.
        rank: rank of this process.
        prefix: prefix of all keys.
    """

    def __init__(self, store: Any, *, rank: int, prefix: str) -> None:
        self._store, self._rank, self._process, self._start = store, rank, os.getpid(), 1
        host = _host()
        self._turns, self._here = f"{prefix}/turns", f"{prefix}/processes/{host}" if host else ""
        self._beside: dict[int, tuple[int, int, str]] = {}  # rank -> start, process and its begin, of this host
        with contextlib.suppress(Exception):
            self._start = int(store.add(f"{prefix}/starts/{rank}", 1))
            if self._start > 1:  # the process before has ended, and this one has not
                self._append(self._turns, _BEGUN)
            if self._here and (begin := _begin_of(self._process)):
                self._append(self._here, f"{self._process} {begin}")
            atexit.register(self._say)  # after the saves of this process: they are waited for before

    def __call__(self) -> frozenset[int]:
        """Return the ranks that have ended, as far as this process knows."""
        with contextlib.suppress(Exception):
            latest, ended = dict[int, int](), set[tuple[int, int]]()
            for rank, start, what in self._lines(self._turns):
                if what == _ENDED:
                    ended.add((int(rank), int(start)))
                else:
                    latest[int(rank)] = max(latest.get(int(rank), 1), int(start))
            return frozenset(rank for rank, start in (*ended, *self._killed()) if start >= latest.get(rank, 1))
        return frozenset()

    def _killed(self) -> list[tuple[int, int]]:
        for rank, start, process, begin in self._lines(self._here) if self._here else ():
            self._beside[int(rank)] = int(start), int(process), begin
        return [
            (rank, start) for rank, (start, process, begin) in self._beside.items() if _begin_of(process) not in (begin, None)
        ]

    def _lines(self, key: str) -> list[list[str]]:
        return [line.split(" ") for line in self._read(key).splitlines()]

    def _append(self, key: str, text: str) -> None:
        self._store.append(key, f"{self._rank} {self._start} {text}\n")

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
            self._append(self._turns, _ENDED)


def _host() -> str:
    """Return what all processes that see each other's numbers have in common; '' if it is not known."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}-{os.readlink(_PROC / 'self/ns/pid')}" if boot_id() else ""
    return ""


def _begin_of(process: int) -> str | None:
    """Return when a process began, in ticks; '' if it does not run, None if this cannot be found out now."""
    try:
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, IndexError, ValueError):  # no free file descriptor, or no permission
        return None
