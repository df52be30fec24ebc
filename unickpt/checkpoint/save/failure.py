"""Failures of a save: the kind of an exception, and what follows from the kind."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import torch

from unickpt.base import errors
from unickpt.checkpoint.coordination.failure import Failure, FailureKind

#: A second universal save fails in the same way, so the framework saves in its own format.
FRAMEWORK_SAVES = frozenset({FailureKind.UNSUPPORTED, FailureKind.UNEXPECTED})
#: A save of the framework would return as if all were well, and its files could not be resumed: they would lie under another
#: folder or tag on each rank, lie outside of the save directory, replace the checkpoint of another model, or hold
#: the state of another rank. So nothing is saved, whatever failed on other ranks.
NOTHING_SAVES = frozenset({FailureKind.ARGUMENTS, FailureKind.OUTSIDE, FailureKind.OTHER_MODEL, FailureKind.UNRESUMABLE})

_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch, c10/core/impl/alloc_cpu.cpp: a plain RuntimeError
_NO_DEVICE_MEMORY: type[Exception] = torch.cuda.OutOfMemoryError  # torch.OutOfMemoryError since torch 2.5


def save_failure(error: BaseException, rank: int, *, describing: bool = False) -> Failure:
    """Return the failure that an exception of a save on a rank means.

    ``describing``: the rank was describing its state. An ``OSError`` then does not come from the checkpoint's storage.
    """
    kind = _kind(error, describing=describing)
    text = f"{type(error).__name__}: {error}"
    if kind in (FailureKind.UNSUPPORTED, FailureKind.UNRESUMABLE, FailureKind.OUTSIDE, FailureKind.OTHER_MODEL):
        text = str(error)
    elif kind is FailureKind.INTERRUPTED:
        text = type(error).__name__
    elif kind in (FailureKind.UNEXPECTED, FailureKind.MEMORY):
        text += _raised_at(error)
    tensor, file = (error.tensor, error.file) if isinstance(error, errors.UnickptError) else ("", "")
    return Failure(kind, rank, tensor, file, text)


def _kind(error: BaseException, *, describing: bool) -> FailureKind:
    if isinstance(error, errors.UnsupportedLayoutError):
        return FailureKind.UNSUPPORTED if error.resumable else FailureKind.UNRESUMABLE
    if isinstance(error, errors.OtherModelError):
        return FailureKind.OTHER_MODEL
    if isinstance(error, errors.ChangedError):
        return FailureKind.CHANGED
    if isinstance(error, errors.UnsafePathError):
        return FailureKind.OUTSIDE
    if isinstance(error, errors.CoordinationError):
        return FailureKind.COORDINATION
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return FailureKind.INTERRUPTED
    if isinstance(error, errors.StorageError):
        return FailureKind.STORAGE
    if is_out_of_memory(error):
        return FailureKind.MEMORY
    if not describing and isinstance(error, (OSError, errors.FormatError, errors.CorruptCheckpointError)):
        return FailureKind.STORAGE
    return FailureKind.UNEXPECTED


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this process or its device has too little memory. The framework's own save would need as much.

    torch raises a plain ``RuntimeError`` if the host has too little, so its text decides.
    """
    if isinstance(error, OSError):  # mmap
        return error.errno == errno.ENOMEM
    known = isinstance(error, (MemoryError, _NO_DEVICE_MEMORY))
    return known or (type(error) is RuntimeError and _NO_HOST_MEMORY in str(error))


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" (at {Path(last.filename).name}:{last.lineno} in {last.name})"
