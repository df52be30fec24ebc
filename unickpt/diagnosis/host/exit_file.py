"""File with the ends of a job's processes on this host, beside its rings. It tells who ended first after all have ended.

The agent writes it: the rings alone do not show whether a rank crashed or was ended by its launcher.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from unickpt.base.private_files import append, read_text
from unickpt.diagnosis.host.process_exits import ExitStatus, ProcessExit

EXITS, _MOST_BYTES = "exits.jsonl", 1 << 20


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
