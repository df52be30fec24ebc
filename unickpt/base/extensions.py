"""The extensions in C: which there are, and whether those of this installation have what its Python code calls.

An editable installation keeps the files that were built before the C code was changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any


class Built(Enum):
    """State of an extension in this installation."""

    MISSING = "missing"
    OLD = "old"  # it was built before its code was changed
    UNSUITED = "unsuited"  # this processor lacks its instructions
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ExtensionModule:
    """An extension in C.

    Attributes:
        does: what it does, as the key in JSON: ``recording``, ``copying``, ``checksums`` or ``reading``.
        module: its name.
        functions: what the Python code calls.
        without: what is slower without it.
    """

    does: str
    module: str
    functions: tuple[str, ...]
    without: str

    def loaded(self) -> ModuleType | None:
        """Return the module; None if it is not built."""
        return _loaded(self.module)

    def function(self, name: str) -> Any:
        """Return a function; None if the module is not built, or was built before it had the function."""
        return getattr(self.loaded(), name, None)

    @property
    def built(self) -> Built:
        found = self.loaded()
        if found is None:
            return Built.MISSING
        if not all(hasattr(found, name) for name in self.functions):
            return Built.OLD
        return Built.READY if getattr(found, "is_fast", lambda: True)() else Built.UNSUITED


@lru_cache
def _loaded(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


RECORDING = ExtensionModule(
    "recording", "unickpt.diagnosis.recording._fast", ("State",), "a record of a call takes some microseconds"
)
COPYING = ExtensionModule(
    "copying", "unickpt.checkpoint.format._casts", ("copies", "samples"), "asynchronous saves stop training longer"
)
CHECKSUMS = ExtensionModule(
    "checksums", "unickpt.checkpoint.format._checksums", ("is_fast", "block_sums"), "training beside a save is slower"
)
READING = ExtensionModule(
    "reading",
    "unickpt.checkpoint.load._checked_read",
    ("is_fast", "read_pieces", "read_parts"),
    "loads from memory take longer",
)
EXTENSIONS = (RECORDING, COPYING, CHECKSUMS, READING)
