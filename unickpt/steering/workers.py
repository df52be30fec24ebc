"""Workers of torchrun's agent in this process that are stopped, so that SIGTERM does not reach them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_stopped_workers() -> list[int]:
    """Kill worker processes of this agent that are stopped (SIGSTOP). Return their process numbers.

    torchrun sends SIGTERM and waits for 30 s. A stopped process cannot react to it.
    """
    killed = []
    for pid in _children():
        with contextlib.suppress(OSError):
            if _state(pid) == "T" and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _children() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _state(pid: int) -> str:
    """Return the state letter of ``proc(5)``. The name before it may contain anything, so it is skipped by its last bracket."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
