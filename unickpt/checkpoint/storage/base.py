"""Protocols of the storage backends, and functions on paths and URLs.

A path names a directory (``posix.py``). A URL names a folder in an object store (``fsspec.py``).
Every failure is a ``StorageError`` with the name of the file and the error of the system or of the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeGuard, runtime_checkable

_MAX_TEXT_BYTES = 4096
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")


class Sink(Protocol):
    """A file that is written sequentially."""

    def write(self, parts: Sequence[memoryview]) -> None:
        """Append all parts, in as few calls as the system allows. The caller may reuse the buffers after the call."""


class Reader(Protocol):
    """A file opened for positioned reads. Threads may share it. ``path`` is its name in messages."""

    @property
    def path(self) -> str: ...

    @property
    def block_bytes(self) -> int:
        """Preferred size of one read, in bytes."""

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill the parts in order with the bytes of the file from ``offset_bytes`` on, or raise StorageError."""


@runtime_checkable
class DescriptorReader(Reader, Protocol):
    """A ``Reader`` of a file that the system has open as ``descriptor``."""

    @property
    def descriptor(self) -> int: ...

    def note(self, size_bytes: int) -> None:
        """Take note of bytes that the caller has read through ``descriptor``."""


@runtime_checkable
class CachedReader(Reader, Protocol):
    """A ``Reader`` of files that the page cache may hold.

    What it does not hold is read best by one thread, front to back: then the kernel reads ahead. Several threads in one file
    defeat that.
    """

    def is_cached(self, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0, /) -> bool:
        """Return whether the page cache holds most of a range; ``unknown`` if the system does not tell.

        With ``every``: whether it holds all of about so many pages of the range.
        """


def has_descriptor(reader: Reader) -> TypeGuard[DescriptorReader]:
    """Return whether a reader has a descriptor. ``isinstance`` of a protocol takes 50 µs before Python 3.12."""
    return hasattr(reader, "descriptor")


def may_be_cached(reader: Reader) -> TypeGuard[CachedReader]:
    """Return whether the page cache may hold the file of a reader."""
    return hasattr(reader, "is_cached")


class Storage(Protocol):
    """Files below one root folder, addressed by relative names with ``/``.

    All methods raise StorageError, except those that delete.
    """

    def where(self, name: str = "") -> str:
        """Return the path or URL of a file, or of the root if ``name`` is empty."""

    def subfolder(self, folder: str) -> Storage:
        """Return the storage of a folder below this one. The folder need not exist."""

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a regular file, or None if it does not exist."""

    def sizes_bytes(self, names: Sequence[str]) -> list[int | None]:
        """Return ``size_bytes`` of several files, with as few requests as possible."""

    def modified_ns(self, name: str) -> int:
        """Return the modification time of a file in nanoseconds since the epoch, or the current time if it is unknown."""

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted relative names of the files directly in a folder. A missing folder gives an empty list."""

    def folders(self) -> list[str]:
        """Return the sorted names of the folders directly below the root."""

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` bytes of a file."""
        buffer = bytearray(size_bytes)
        with self.reader(name) as reader:
            reader.read_into([memoryview(buffer)], offset_bytes)
        return bytes(buffer)

    def reader(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for positioned reads from any thread."""

    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> AbstractContextManager[Sink]:
        """Create a file. It is durable when the block ends without error; after an error it is missing or incomplete.

        Args:
            name: relative name.
            direct: bypass the page cache if the file system supports it.
            about_bytes: expected size in bytes, or 0 if it is unknown.
        """

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replace a file atomically: readers see the old bytes or the new ones, also after a crash."""

    def delete(self, name: str) -> None:
        """Remove a file if it exists. A failure is ignored."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and the files directly in it. Failures are ignored."""

    def delete_if_empty(self, folder: str = "") -> None:
        """Remove a folder if it is empty. Object stores have no folders to remove."""

    def try_lock(self, name: str) -> Callable[[], None] | None:
        """Lock a file name against other processes, without waiting. The lock ends with the process.

        Return the function that releases it, or None if another process holds it. A storage without locks always grants it.
        """


def is_url(where: str | os.PathLike[str]) -> bool:
    """Return whether a location is a URL (``scheme://...``) and not a path."""
    return _URL.match(os.fspath(where)) is not None


def absolute(where: str) -> str:
    """Return the absolute path of a location. A URL only loses its trailing slashes."""
    return where.rstrip("/") if is_url(where) else os.path.abspath(where)


def resolved(where: str) -> str:
    """Return the location behind the symbolic links of a path. Two ranks may name one folder in two ways."""
    return where if is_url(where) else os.path.realpath(where)


def join(where: str, name: str) -> str:
    """Return the path or URL of ``name`` in the folder ``where``."""
    return f"{where.rstrip('/')}/{name}" if is_url(where) else os.path.join(where, name)


def split(where: str) -> tuple[str, str]:
    """Split a path or URL into its folder and its last component."""
    folder, _, name = where.rstrip("/").rpartition("/")
    return folder, name


def read_text(storage: Storage, name: str) -> str | None:
    """Return the stripped text of a small file such as ``latest``, or None if it does not exist."""
    size = storage.size_bytes(name)
    if size is None:
        return None
    return storage.read(name, 0, min(size, _MAX_TEXT_BYTES)).decode(errors="replace").strip()
