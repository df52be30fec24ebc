"""Why one rank could not load a checkpoint, as a value that the ranks exchange."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unickpt.errors import (
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    FormatError,
    LanguageError,
    MismatchError,
    NeighbourFailedError,
    NewerFormatError,
    NotACheckpointError,
    StorageError,
    UnickptError,
    UnsupportedLayoutError,
)
from unickpt.storage import is_url

Kind = Literal[
    "absent", "damaged", "newer", "mismatch", "unsupported", "permission", "storage", "coordination", "neighbour", "unexpected"
]

# An older checkpoint helps against these and no others. Everything else would fail again with an older checkpoint, or hides
# a newer one that is whole.
DAMAGE: frozenset[Kind] = frozenset({"absent", "damaged"})

_KINDS: tuple[tuple[type[UnickptError], Kind], ...] = (  # subclasses before their base
    (NewerFormatError, "newer"),
    (NotACheckpointError, "absent"),
    (CorruptCheckpointError, "damaged"),
    (FormatError, "damaged"),
    (MismatchError, "mismatch"),
    (LanguageError, "mismatch"),
    (UnsupportedLayoutError, "unsupported"),
    (NeighbourFailedError, "neighbour"),
    (CoordinationError, "coordination"),
    (ConfigError, "unexpected"),
)
_ERRORS: Mapping[Kind, type[UnickptError]] = {
    "absent": NotACheckpointError,
    "damaged": CorruptCheckpointError,
    "newer": NewerFormatError,
    "mismatch": MismatchError,
    "unsupported": UnsupportedLayoutError,
    "permission": StorageError,
    "storage": StorageError,
    "coordination": CoordinationError,
    "neighbour": CoordinationError,
    "unexpected": CoordinationError,
}
_REFUSED = {errno.EACCES, errno.EPERM}
_LOST = {  # the file is gone, or its medium cannot give it back: it will not come back by waiting
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped one rank.

    Attributes:
        kind: decides whether an older checkpoint may be used (``DAMAGE``), and the class of the error on other ranks.
        rank: which one.
        tensor, file: what it was reading; '' if it was nothing in particular.
        text: for people. Nothing is decided by it.
    """

    kind: Kind
    rank: int
    tensor: str
    file: str
    text: str

    def to_message(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        """The inverse of ``to_message``."""
        return cls(**message)


def failure_of(error: BaseException, *, rank: int, where: str) -> Failure:
    """An exception as a value.

    Args:
        error: raised while a checkpoint was opened, planned or read.
        rank: of this process.
        where: path or URL of the checkpoint. A disk that cannot read a file will not read it tomorrow; an object store that
            does not answer now may.
    """
    kind = _kind(error, where)
    text = str(error) if kind != "unexpected" or isinstance(error, UnickptError) else f"{type(error).__name__}: {error}"
    located = next((err for err in _chain(error) if isinstance(err, UnickptError) and (err.file or err.tensor)), None)
    tensor, file = ("", "") if located is None else (located.tensor, located.file)
    return Failure(kind, rank, tensor, file, text)


def is_damage(failures: Sequence[Failure]) -> bool:
    """Whether an older checkpoint may be used instead."""
    return bool(failures) and all(failure.kind in DAMAGE for failure in failures)


def error_of(failures: Sequence[Failure], *, where: str, what: str = "could not load it") -> UnickptError:
    """The error that a rank raises for other ranks' failures: of the first rank whose failure is no damage, if there is one."""
    failure = min(failures, key=lambda f: (f.kind == "neighbour", f.kind in DAMAGE, f.rank))
    others = sorted({f.rank for f in failures} - {failure.rank})
    also = f" ({len(others)} more failed: rank {', '.join(map(str, others[:16]))})" if others else ""
    error = _ERRORS[failure.kind](f"{where}: rank {failure.rank} {what}: {failure.text}{also}")
    error.file, error.tensor = failure.file, failure.tensor
    return error


def _kind(error: BaseException, where: str) -> Kind:
    for err in _chain(error):
        for of, kind in _KINDS:
            if isinstance(err, of):
                return kind
        if isinstance(err, StorageError):
            return _storage_kind(err, is_url(where))
    return "unexpected"


def _storage_kind(error: BaseException, remote: bool) -> Kind:
    cause = next((err for err in _chain(error) if isinstance(err, OSError)), None)
    if isinstance(cause, PermissionError) or (cause is not None and cause.errno in _REFUSED):
        return "permission"
    if isinstance(cause, FileNotFoundError):
        return "damaged"
    if remote:
        return "storage"
    return "damaged" if cause is None or cause.errno in _LOST else "storage"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
