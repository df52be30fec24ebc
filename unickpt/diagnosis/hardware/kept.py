"""The file in which the agent of a host keeps what the hardware has told, for whom looks after the job has ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unickpt.base.private_files import file_name, read_text, replacing
from unickpt.diagnosis.hardware.events import MOST_EVENTS, EventKind, HostEvent, HostHardware

PREFIX, SUFFIX, _MOST_BYTES, _LONGEST = "hardware-", ".json", 1 << 20, 256  # characters of a text


def keep(folder: Path, host: str, found: HostHardware) -> None:
    """Write the file of a host beside the rings. Raises OSError."""
    with replacing(folder / f"{PREFIX}{file_name(host)}{SUFFIX}") as file:
        file.write(json.dumps({"host": host, "hardware": as_fields(found)}).encode())


def kept(folder: Path) -> dict[str, HostHardware]:
    """Return what the files in a folder hold, by host. Damaged files are left out."""
    found = {}
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            entry = json.loads(read_text(path, _MOST_BYTES))
            found[str(entry["host"])[:_LONGEST]] = from_fields(*entry["hardware"])
    return found


def as_fields(found: HostHardware) -> list[Any]:
    """Return the values as JSON types."""
    events = [[e.kind.value, e.device, e.begin_ns, e.end_ns, e.amount, e.code, e.pid, e.name] for e in found.events]
    return [list(found.sources), events]


def from_fields(sources: Sequence[Any], events: Sequence[Any]) -> HostHardware:
    """Return what ``as_fields`` has written, checked: it may come from another host.

    Raises:
        ValueError, TypeError, OverflowError: the values are not of that form.
    """
    if len(sources) > MOST_EVENTS or len(events) > MOST_EVENTS:
        raise ValueError("more sources or events than a host has")
    return HostHardware(tuple(str(each)[:_LONGEST] for each in sources), tuple(_event(*fields) for fields in events))


def _event(kind: Any, device: Any, begin_ns: Any, end_ns: Any, amount: Any, code: Any, pid: Any, name: Any) -> HostEvent:
    whole = (begin_ns, end_ns, code, pid)
    if not all(isinstance(each, int) and abs(each) < 1 << 62 for each in whole) or not isinstance(amount, int | float):
        raise ValueError("not the fields of an event")
    return HostEvent(EventKind(kind), str(device)[:_LONGEST], begin_ns, end_ns, float(amount), code, pid, str(name)[:_LONGEST])


def moved(hardware: Mapping[str, HostHardware], offset_ns: int) -> dict[str, HostHardware]:
    """Return the same on another clock."""
    return {host: one.moved(offset_ns) for host, one in hardware.items()}
