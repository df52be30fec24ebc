"""Why a rank could not do its part of a save: a value that travels, and that nobody has to parse."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unickpt.errors import (
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
    UnsupportedLayoutError,
)

Kind = Literal["storage", "coordination", "unsupported", "arguments", "defect", "interrupted"]

FRAMEWORK_SAVES: tuple[Kind, ...] = ("unsupported", "arguments", "defect")  # another try of ours would end the same way
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Why a save has no checkpoint.

    Attributes:
        kind: ``storage`` (full, gone, locked by another job), ``coordination`` (a rank is missing), ``unsupported`` (a
            layout that this release does not describe), ``arguments`` (the ranks were called with different ones),
            ``defect`` (any other exception), ``interrupted`` (SIGTERM or Ctrl-C).
        rank: the rank that failed.
        text: type and message of the exception.
        where: file, line and function that raised it, or ''.
    """

    kind: Kind
    rank: int
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}" + (f" (at {self.where})" if self.where and self.kind == "defect" else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SaveFailure:
        return SaveFailure(value["kind"], int(value["rank"]), value["text"], value["where"])


def failure_of(err: BaseException, rank: int, *, describing: bool = False) -> SaveFailure:
    """The failure that an exception means.

    Args:
        err: what was raised.
        rank: on which rank.
        describing: while the rank described its state. An ``OSError`` is then not the checkpoint storage's.
    """
    text = f"{type(err).__name__}: {err}"
    kind: Kind = "defect"
    if isinstance(err, UnsupportedLayoutError):
        kind, text = "unsupported", str(err)
    elif isinstance(err, CoordinationError):
        kind = "coordination"
    elif isinstance(err, (KeyboardInterrupt, SystemExit)):
        kind = "interrupted"
        text = type(err).__name__
    elif isinstance(err, StorageError) or (not describing and isinstance(err, (OSError, FormatError, CorruptCheckpointError))):
        kind = "storage"
    return SaveFailure(kind, rank, text, _raised_at(err))


def _raised_at(err: BaseException) -> str:
    frames = traceback.extract_tb(err.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def sentence(failures: Iterable[SaveFailure]) -> str:
    """All failures in one line, those of many ranks cut short."""
    found = sorted(failures, key=lambda failure: failure.rank)
    more = f"; and {len(found) - _SHOWN} more ranks" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more
