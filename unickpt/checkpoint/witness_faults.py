"""Faults that the witness of a job has found: ``<save_dir>/witness.json``. A resume goes back behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.json_text import parse_json
from unickpt.checkpoint.format.witnessed import WitnessFault, fault_of
from unickpt.checkpoint.storage.open import open_storage

FILE, _LONGEST = "witness.json", 1 << 20
_LONGEST_TEXT = 4096
_REMOVE = "If no witness has found a fault in this job, remove the file"


def read_faults(folder: str | os.PathLike[str]) -> tuple[WitnessFault, ...]:
    """Return the faults of a folder in the order in which they were found.

    Raises:
        FormatError: the file is damaged.
        StorageError: it cannot be read.
    """
    place = open_storage(folder)
    size = place.size_bytes(FILE)
    if size is None:
        return ()
    where = place.where(FILE)
    if size > _LONGEST:
        raise FormatError(f"{where}: {size:,} bytes are too many; the limit is {_LONGEST:,}. {_REMOVE}")
    try:
        body = parse_json(place.read(FILE, 0, size), where=where)
        faults = body.get("faults") if isinstance(body, dict) else None
        if not isinstance(faults, list):
            raise FormatError(f"{where}: it has no list 'faults'")
        return tuple(fault_of(each, where=where) for each in faults)
    except FormatError as err:
        raise FormatError(f"{err}. {_REMOVE}") from None


def add_fault(folder: str | os.PathLike[str], fault: WitnessFault) -> None:
    """Add a fault. One rank calls it.

    Raises:
        FormatError: the file is damaged. It stays as it is.
        StorageError: it cannot be read or written.
    """
    _write(folder, [*read_faults(folder), replace(fault, text=fault.text[:_LONGEST_TEXT])])


def note_gone_back(folder: str | os.PathLike[str]) -> None:
    """Note that a job has loaded a checkpoint of the folder. One rank calls it. Raises as ``add_fault``."""
    faults = read_faults(folder)
    if not all(fault.gone_back for fault in faults):
        _write(folder, [replace(fault, gone_back=True) for fault in faults])


def _write(folder: str | os.PathLike[str], faults: Sequence[WitnessFault]) -> None:
    body = {"faults": [fault.as_json() for fault in faults]}
    open_storage(folder).write_atomic(FILE, json.dumps(body, indent=1).encode())
