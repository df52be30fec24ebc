"""Failures of a load: the kind of an exception, and the error that the other ranks raise for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence

from unickpt.base import errors
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.storage.base import is_url

# An older checkpoint helps against these and no others. Everything else would fail again with an older checkpoint, or hides
# a newer one that is complete.
DAMAGE = frozenset({FailureKind.ABSENT, FailureKind.DAMAGED})

_KINDS: tuple[tuple[type[errors.UnickptError], FailureKind], ...] = (  # subclasses before their base
    (errors.NewerFormatError, FailureKind.NEWER),
    (errors.NotACheckpointError, FailureKind.ABSENT),
    (errors.CorruptCheckpointError, FailureKind.DAMAGED),
    (errors.FormatError, FailureKind.DAMAGED),
    (errors.MismatchError, FailureKind.MISMATCH),
    (errors.LanguageError, FailureKind.MISMATCH),
    (errors.UnsupportedLayoutError, FailureKind.UNSUPPORTED),
    (errors.HostPeerFailedError, FailureKind.HOST_PEER),
    (errors.CoordinationError, FailureKind.COORDINATION),
    (errors.ConfigError, FailureKind.UNEXPECTED),
)
_ERRORS: Mapping[FailureKind, type[errors.UnickptError]] = {
    FailureKind.ABSENT: errors.NotACheckpointError,
    FailureKind.DAMAGED: errors.CorruptCheckpointError,
    FailureKind.NEWER: errors.NewerFormatError,
    FailureKind.MISMATCH: errors.MismatchError,
    FailureKind.UNSUPPORTED: errors.UnsupportedLayoutError,
    FailureKind.UNRESUMABLE: errors.UnsupportedLayoutError,
    FailureKind.PERMISSION: errors.StorageError,
    FailureKind.STORAGE: errors.StorageError,
    FailureKind.COORDINATION: errors.CoordinationError,
    FailureKind.HOST_PEER: errors.CoordinationError,
    FailureKind.MEMORY: errors.CoordinationError,
    FailureKind.ARGUMENTS: errors.CoordinationError,
    FailureKind.OUTSIDE: errors.CoordinationError,
    FailureKind.OTHER_MODEL: errors.MismatchError,
    FailureKind.INTERRUPTED: errors.CoordinationError,
    FailureKind.UNEXPECTED: errors.CoordinationError,
}
_REFUSED = {errno.EACCES, errno.EPERM}
_LOST = {  # the file is gone, or its medium cannot give it back: it will not come back by waiting
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN,
}  # fmt: skip


def failure_of(error: BaseException, *, rank: int, where: str) -> Failure:
    """An exception, raised while a checkpoint was opened, planned or read, as a value.

    ``where``: path or URL of the checkpoint. A disk that cannot read a file will not read it tomorrow; an object store that
    does not answer now may.
    """
    kind = _kind(error, where)
    named = kind is FailureKind.UNEXPECTED and not isinstance(error, errors.UnickptError)
    text = f"{type(error).__name__}: {error}" if named else str(error)
    located = next((err for err in _chain(error) if isinstance(err, errors.UnickptError) and (err.file or err.tensor)), None)
    tensor, file = ("", "") if located is None else (located.tensor, located.file)
    return Failure(kind, rank, tensor, file, text)


def is_damage(failures: Sequence[Failure]) -> bool:
    """Whether an older checkpoint may be used instead."""
    return bool(failures) and all(failure.kind in DAMAGE for failure in failures)


def error_of(failures: Sequence[Failure], *, where: str, what: str = "could not load it") -> errors.UnickptError:
    """The error that a rank raises for other ranks' failures: of the first rank whose failure is no damage, if there is one."""
    failure = min(failures, key=lambda f: (f.kind is FailureKind.HOST_PEER, f.kind in DAMAGE, f.rank))
    others = sorted({f.rank for f in failures} - {failure.rank})
    also = f" ({len(others)} more failed: rank {', '.join(map(str, others[:16]))})" if others else ""
    error = _ERRORS[failure.kind](f"{where}: rank {failure.rank} {what}: {failure.text}{also}")
    error.file, error.tensor = failure.file, failure.tensor
    return error


def _kind(error: BaseException, where: str) -> FailureKind:
    for err in _chain(error):
        for of, kind in _KINDS:
            if isinstance(err, of):
                return kind
        if isinstance(err, errors.StorageError):
            return _storage_kind(err, is_url(where))
    return FailureKind.UNEXPECTED


def _storage_kind(error: BaseException, remote: bool) -> FailureKind:
    cause = next((err for err in _chain(error) if isinstance(err, OSError)), None)
    if isinstance(cause, PermissionError) or (cause is not None and cause.errno in _REFUSED):
        return FailureKind.PERMISSION
    if isinstance(cause, FileNotFoundError):
        return FailureKind.DAMAGED
    if remote:
        return FailureKind.STORAGE
    return FailureKind.DAMAGED if cause is None or cause.errno in _LOST else FailureKind.STORAGE


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
