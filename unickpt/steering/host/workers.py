"""Workers of torchrun's agent in this process: those that SIGTERM may not end, and those that have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from unickpt.base.failure_kinds import Remedy
from unickpt.base.left_workers import rank_in
from unickpt.base.process_identity import children_of, environment_of, stat_of
from unickpt.base.round_folder import RUN_ID, Failed, note_ended, ranks_saved, read_failure
from unickpt.diagnosis.host.process_exits import ExitWatcher

LOOK_S = 0.2  # interval of looks for workers that have ended
FIRST_LOOK_S, FIRST_S = 0.02, 10.0  # interval of looks for workers that have begun, and for how long
SHORT_S = 30.0  # a worker that ends by itself in this time, without saying why, has not made a step


def kill_stopped_workers() -> list[int]:
    """Kill worker processes of this agent that are stopped (SIGSTOP). Return their process numbers.

    torchrun sends SIGTERM and waits for 30 s. A stopped process cannot react to it.
    """
    return _killed([pid for pid in children_of(os.getpid()) if _state(pid) == "T" and is_worker(environment_of(pid))])


def kill_workers_of_ranks(ranks: Collection[int]) -> list[int]:
    """Kill worker processes of this agent that have these ranks. Return their process numbers.

    A rank that hangs may not react to SIGTERM: Python runs a handler only when the main thread returns to the interpreter.
    """
    found = {pid: environment_of(pid) for pid in (children_of(os.getpid()) if ranks else [])}
    return _killed([pid for pid, variables in found.items() if rank_in(variables) in ranks and is_worker(variables)])


def is_worker(variables: Collection[bytes]) -> bool:
    """Return whether a process with this environment belongs to torchrun."""
    return any(each.startswith(f"{RUN_ID}=".encode()) for each in variables)


def _killed(pids: Collection[int]) -> list[int]:
    """Kill processes, and return those that were there."""
    killed = []
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


class EndedWorkers:
    """Tells the workers of this host, and the leader, which ranks of a round have ended. The thread ends with ``close``.

    torchrun's agent is busy while it stops the other workers after the end of one. They may be waiting for the part of the dead
    rank in a save, so they must hear of it in that time. Never raises.

    Args:
        variables: of the environment of the round's workers.
        folder: folder of the round on this host; None without one.
        ended: returns the ranks of the round that are known to have ended on any host.
        tell: called with the ranks of this host that have ended, when there are more.
        begun: called with the ranks of this host by process number, when there are more.
    """

    def __init__(
        self,
        variables: Collection[bytes],
        folder: Path | None,
        ended: Callable[[], frozenset[int]],
        tell: Callable[[tuple[int, ...]], None],
        begun: Callable[[Mapping[int, int]], None] = lambda _: None,
    ) -> None:
        self._variables, self._folder, self._ended, self._tell = frozenset(variables), folder, ended, tell
        self._begun = begun
        self._exits = ExitWatcher()
        self._began_ns = time.monotonic_ns()
        self._ranks: dict[int, int] = {}  # of the workers that have been seen alive, by process number
        self._noted: frozenset[int] = frozenset()
        self._told: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="unickpt-steering-workers", daemon=True).start()

    def look(self) -> None:
        """Look once."""
        with self._lock:
            if self._closed.is_set():
                return
            alive = {pid for pid in children_of(os.getpid()) if _state(pid) not in "ZX"}
            fresh = {pid: rank for pid in alive - self._ranks.keys() if (rank := _rank_of(pid, self._variables)) is not None}
            if fresh:
                self._ranks |= fresh
                self._exits.watch(fresh)
                self._begun(self._ranks)
            here = frozenset(rank for pid, rank in self._ranks.items() if pid not in alive)
            ended = self._ended() | here
            if ended != self._noted:
                self._noted = ended
                if self._folder is not None:
                    note_ended(self._folder, ended)
            if here != self._told:
                self._told = here
                self._tell(tuple(sorted(here)))

    def close(self) -> None:
        """End. The files of a round's folder are its owner's from now on."""
        with self._lock:
            self._closed.set()

    def told_to_end(self) -> bool:
        """Return whether a signal such as SIGTERM has ended the first worker that ended on this host, or its exit code says so.

        Before Linux 6.15, torchrun may have read its status first. Then a worker counts that has noted its last save.
        """
        self._exits.collect()  # torchrun may be ahead of the thread
        ends = {rank: self._exits.known[pid] for pid, rank in self._ranks.items() if pid in self._exits.known}
        first_ns = min((end.at_ns for end in ends.values()), default=0)
        saved = frozenset() if self._folder is None else ranks_saved(self._folder)
        first = {rank: end.status for rank, end in ends.items() if end.at_ns == first_ns}
        return bool(first) and all(rank in saved if status is None else status.asked for rank, status in first.items())

    def failure(self) -> Failed | None:
        """Return why the first worker that has failed on this host ended, if a restart may not help.

        That is so before its first step, and where its exception says so. Workers that were ended by a signal, or with success,
        or that say that another process is the cause, do not count.
        """
        self._exits.collect()
        ends = sorted(
            (self._exits.known[pid].at_ns, rank, pid) for pid, rank in self._ranks.items() if pid in self._exits.known
        )
        for at_ns, rank, pid in ends:
            status = self._exits.known[pid].status
            if status is None or status.signal or status.sound or status.asked:
                continue
            noted = None if self._folder is None else read_failure(self._folder, rank)
            if noted is not None:
                found = noted
            elif at_ns - self._began_ns < SHORT_S * 1e9:
                text = f"ended with exit code {status.code} within {(at_ns - self._began_ns) / 1e9:.0f} s of its start"
                found = Failed(f"exit code {status.code}", text, False)
            else:
                continue
            if not found.follows and (not found.excused or found.remedy is not Remedy.RESTART):
                return replace(found, text=f"rank {rank}: {found.text}")
        return None

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._closed.is_set():
            self._exits.sleep(FIRST_LOOK_S if time.monotonic() - began_s < FIRST_S else LOOK_S)
            with contextlib.suppress(Exception):
                self.look()
        self._exits.close()


def _rank_of(pid: int, wanted: frozenset[bytes]) -> int | None:
    """Return the rank of a worker whose environment has all of these variables; None for other processes."""
    variables = environment_of(pid)
    return rank_in(variables) if wanted <= variables else None


def _state(pid: int) -> str:
    """Return the state letter of ``proc(5)``; ``X``, dead, for a process that does not exist."""
    return (stat_of(pid) or ("X", 0))[0]
