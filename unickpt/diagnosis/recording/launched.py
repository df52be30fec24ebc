"""Ranks that a launcher has started on this host, from a note that the first of them to begin recording leaves.

A rank that hangs before it records anything, while it loads its model for example, has no ring. The note says that it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unickpt.base.left_workers import rank_in
from unickpt.base.private_files import read_text, replacing
from unickpt.base.process_identity import boot_id, children_of, environment_of
from unickpt.diagnosis.host.process_state import State, state_of
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.rank_ranges import MOST_RANKS

_PREFIX, _BYTES = "launched-", 4096
_MOST_PER_HOST = 4096


@dataclass(frozen=True, slots=True)
class LaunchNote:
    """Attributes: first rank of the host and their number; host and boot; process number of the launcher; wall clock in ns."""

    first: int
    count: int
    host: str
    boot: str
    launcher: int
    wall_ns: int


@dataclass(frozen=True, slots=True)
class AbsentRank:
    """A rank that has not begun to record.

    Attributes:
        pid: process number; 0 if unknown.
        host: host name.
        state: state of the process.
        stack: frames of its main thread, innermost first; empty if unknown.
    """

    pid: int
    host: str
    state: State
    stack: tuple[Frame, ...] = ()


def this_host() -> tuple[int, int]:
    """Return the first rank that was started on this host, and their number; -1 and 0 if the environment lacks them."""
    variables = os.environ
    try:
        first = int(variables["RANK"]) - int(variables["LOCAL_RANK"])
        return first, int(variables.get("LOCAL_WORLD_SIZE") or variables.get("LOCAL_SIZE") or 0)  # DeepSpeed's launcher
    except (KeyError, ValueError):
        return -1, 0


def arrives_first(store: Any, first: int, start: str) -> bool:
    """Return whether this is the first rank of its host to begin recording in this start. Asks the job's store once.

    Args:
        store: torch's store of the job; None: the first rank of the host counts as the first one to arrive.
        first: first rank of the host; -1 if unknown.
        start: what distinguishes this start from others of the same job.
    """
    if store is None or first < 0:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    token = secrets.token_hex(16)
    return bool(store.compare_set(f"unickpt/first/{start}/{first}", "", token).decode(errors="replace") == token)


def write_launch(folder: Path, first: int, count: int, wall_ns: int) -> None:
    """Write the note. ``wall_ns`` is before any rank of this start has created its ring."""
    note = LaunchNote(first, count, socket.gethostname(), boot_id(), os.getppid(), wall_ns)
    with replacing(folder / f"{_PREFIX}{note.host}") as file:
        file.write(json.dumps(asdict(note)).encode())


def read_launches(folder: Path) -> list[LaunchNote]:
    """Return the valid notes in a folder."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            raw = json.loads(read_text(path, _BYTES))
            note = LaunchNote(
                int(raw["first"]), int(raw["count"]), str(raw["host"]), str(raw["boot"]), int(raw["launcher"]),
                int(raw["wall_ns"]),
            )  # fmt: skip
            if 0 <= note.first < MOST_RANKS and 0 < note.count <= _MOST_PER_HOST and note.launcher > 0:
                found.append(note)
    return found


def absent_ranks(notes: Collection[LaunchNote], present: Collection[int]) -> dict[int, AbsentRank]:
    """Return the ranks of the notes that are not present."""
    found: dict[int, AbsentRank] = {}
    for note in notes:
        missing = [rank for rank in range(note.first, note.first + note.count) if rank not in present]
        here = note.host == socket.gethostname() and note.boot == boot_id()
        pids = _workers(note.launcher) if missing and here else {}
        for rank in missing:
            pid = pids.get(rank, 0)
            state = state_of(pid, started_before_ns=time.monotonic_ns()) if pid else State.UNKNOWN
            found[rank] = AbsentRank(pid, note.host, state)
    return found


def _workers(launcher: int) -> dict[int, int]:
    """Return the process number of each rank among the children of a launcher, as far as this user may see them."""
    found: dict[int, int] = {}
    for child in children_of(launcher):
        rank = rank_in(environment_of(child))
        if rank is not None:
            found.setdefault(rank, child)
    return found
