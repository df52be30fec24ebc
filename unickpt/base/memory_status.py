"""State of the memory tier of a job for metrics and reports. Rank 0 writes it beside its ring, and the agent reads it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unickpt.base.private_files import read_text, replacing

FILE = "memory.json"
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class HostUsage:
    """What one host holds.

    Attributes:
        host: name of the host.
        rank: its first rank.
        held_bytes: size of all files that it holds, copies included.
        refused: connections that its keeper has refused.
    """

    host: str
    rank: int
    held_bytes: int
    refused: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """State of the memory tier since the start of the processes.

    Attributes:
        hosts: by first rank, at the end of the last save.
        generation, step: newest generation whose copies are complete; 0 before.
        begun_s: when its save began, in seconds since the epoch.
        confirm_s, longest_s: seconds from the call of the save until all copies were complete: the newest, and the longest.
        confirmed: generations whose copies are complete.
        failed: saves into memory without a commit.
        uncopied: committed generations whose copies failed.
        skipped: saves that went to disk because of such a failure.
        left_out: saves that were skipped, because the copies of the one before were not complete.
    """

    hosts: tuple[HostUsage, ...] = ()
    generation: int = 0
    step: int = 0
    begun_s: float = 0.0
    confirm_s: float = 0.0
    longest_s: float = 0.0
    confirmed: int = 0
    failed: int = 0
    uncopied: int = 0
    skipped: int = 0
    left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """The state as JSON types."""
        return asdict(self)


def write_status(folder: Path, status: MemoryStatus) -> None:
    """Write the state into a folder. Never raises."""
    with contextlib.suppress(OSError), replacing(folder / FILE) as file:
        file.write(json.dumps(status.as_json()).encode())


def read_status(folder: Path) -> MemoryStatus | None:
    """Return the state that ``write_status`` wrote; None if there is none, or if it is malformed."""
    text = read_text(folder / FILE, _LONGEST)
    try:
        said = json.loads(text)
        hosts = tuple(
            HostUsage(str(each["host"]), int(each["rank"]), int(each["held_bytes"]), int(each["refused"]))
            for each in said.pop("hosts")
        )
        status = MemoryStatus(hosts, **{name: _number(value) for name, value in said.items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return status


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or value != value:
        raise ValueError(f"{value!r} is no number")
    return value
