"""Faults that the witness of a job has found: ``<save_dir>/witness.json``. A resume goes back behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from unickpt.base.errors import FormatError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.format.json_text import parse_json
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault, fault_of
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


class FaultFolders:
    """Folders of the checkpoints of a watched model. Used on the rank that writes their manifests.

    Each has the number of faults that it had at first: from these the state of the model has gone back. This process adds later
    ones.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._loaded: set[str] = set()

    def note(self, folder: str) -> int:
        """Note that the model is saved into a folder. Return from how many of its faults the state has gone back."""
        for other in self._loaded - {folder}:
            del self._first[other]
        self._loaded.clear()
        return self._read(folder)

    def loaded(self, folder: str) -> None:
        """Note that the model is loaded from a folder: it counts until the model is saved into another one."""
        if folder not in self._first or folder in self._loaded:
            self._first.pop(folder, None)
            self._loaded.add(folder)
            self._read(folder)

    def passed(self, folder: str, until: int, checks: tuple[str, ...]) -> Passed:
        """Return what a checkpoint of a folder says of the witness."""
        return Passed(until, checks, self.note(folder))

    def known(self) -> list[str]:
        """Return the folders."""
        return list(self._first)

    def _read(self, folder: str) -> int:
        if folder not in self._first:
            self._first[folder] = 0
            try:
                self._first[folder] = len(read_faults(folder))
            except UnickptError as err:
                logger.warning(
                    "unickpt: witness: checkpoints of this run do not say that it has gone back from a fault: %s", err
                )
        return self._first[folder]
