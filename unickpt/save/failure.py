"""Failures of a save: the kind of an exception, and what follows from the kind."""

from __future__ import annotations

import traceback
from pathlib import Path

from unickpt.coordination.failure import Failure, FailureKind
from unickpt.errors import (
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
    UnickptError,
    UnsupportedLayoutError,
)

#: A second universal save fails in the same way, so the framework saves in its own format.
FRAMEWORK_SAVES = frozenset({FailureKind.UNSUPPORTED, FailureKind.ARGUMENTS, FailureKind.UNEXPECTED})


def save_failure(error: BaseException, rank: int, *, describing: bool = False) -> Failure:
    """Return the failure that an exception of a save means.

    Args:
        error: exception that was raised.
        rank: rank that raised it.
        describing: the rank was describing its state. An ``OSError`` then does not come from the checkpoint's storage.
    """
    kind = _kind(error, describing=describing)
    text = f"{type(error).__name__}: {error}"
    if kind is FailureKind.UNSUPPORTED:
        text = str(error)
    elif kind is FailureKind.INTERRUPTED:
        text = type(error).__name__
    elif kind is FailureKind.UNEXPECTED:
        text += _raised_at(error)
    tensor, file = (error.tensor, error.file) if isinstance(error, UnickptError) else ("", "")
    return Failure(kind, rank, tensor, file, text)


def _kind(error: BaseException, *, describing: bool) -> FailureKind:
    if isinstance(error, UnsupportedLayoutError):
        return FailureKind.UNSUPPORTED
    if isinstance(error, CoordinationError):
        return FailureKind.COORDINATION
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return FailureKind.INTERRUPTED
    if isinstance(error, StorageError):
        return FailureKind.STORAGE
    if not describing and isinstance(error, (OSError, FormatError, CorruptCheckpointError)):
        return FailureKind.STORAGE
    return FailureKind.UNEXPECTED


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" (at {Path(last.filename).name}:{last.lineno} in {last.name})"
