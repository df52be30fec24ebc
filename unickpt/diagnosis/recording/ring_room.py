"""Room for the rings of a host in a folder that may be small, such as ``/dev/shm`` of a container.

All ranks of a host take the same decision: that of the rank which asks first. Rings that do not fit hold fewer records. If not
even small ones fit, no rank of the host is timed. There is one warning.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import UnickptError
from unickpt.base.private_files import free_bytes, more_room
from unickpt.diagnosis.recording.records import RECORD
from unickpt.diagnosis.recording.ring import ring_bytes

SHARE = 0.5  # of the free room that the rings of all ranks may take: the job uses the folder, too
FEWEST = 2048  # records of a ring that is of use


class TimingOffError(UnickptError):
    """The rings of this host do not fit; the rank that found it has logged a warning."""


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """Attributes: folder of the rings; wanted records of each; ranks of the host; what names host and start in the store."""

    folder: Path
    records: int
    ranks: int
    name: str


def fitting_records(request: RoomRequest, free: int) -> int:
    """Return how many records each ring can have; 0 if they do not fit."""
    room = int(free * SHARE) // request.ranks
    if ring_bytes(request.records) <= room:
        return request.records
    records = (room - ring_bytes(0)) // RECORD.itemsize
    return min(records, request.records) if records >= min(FEWEST, request.records) else 0


def agreed_records(request: RoomRequest, store: Any, warn: Callable[[str], None]) -> int:
    """Return how many records the ring of this rank has.

    Args:
        request: what is wanted.
        store: torch's store of the job; None: this rank decides for itself.
        warn: writes a warning, on the rank that decides.

    Raises:
        TimingOffError: the rings do not fit.
    """
    free = free_bytes(request.folder)
    own = found = fitting_records(request, free)
    decides = store is None
    if store is not None:
        text = f"{own} {secrets.token_hex(8)}"
        first = store.compare_set(f"unickpt/records/{request.name}", "", text).decode(errors="replace")
        decides = first == text
        number = first.partition(" ")[0]
        found = min(int(number), request.records) if number.isdecimal() else own
    if decides and found < request.records:
        needed = request.ranks * ring_bytes(request.records)
        what = f"they hold {found:,} records each instead of {request.records:,}" if found else "collectives are not timed"
        warn(
            f"unickpt: the rings of {request.ranks} ranks need {needed:,} bytes, and {request.folder} has {free:,} bytes free, "
            f"of which they may take half: {what}; training is not affected. {more_room(request.folder)}, or set the option "
            "timing.records or timing.folder"
        )
    if not found:
        raise TimingOffError(f"{request.folder} has {free:,} bytes free")
    return found
