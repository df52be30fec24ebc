"""Where checkpoints lie: what the core needs of a place, and the way from a path or URL to one.

A path is a directory (``posix.py``), a URL a folder in an object store (``object_store.py``).
Every failure is a ``StorageError`` that names the file and what the system or the store said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from unickpt.errors import StorageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_FILE_SCHEME = "file://"
_MAX_TEXT_BYTES = 4096


class Sink(Protocol):
    """A file being written front to back."""

    def write(self, parts: Sequence[memoryview]) -> None:
        """Append all parts, in as few calls as the system allows. What they hold may change once this returns."""


class Reader(Protocol):
    """A file being read, from any number of threads. ``path`` names it in messages."""

    @property
    def path(self) -> str: ...

    @property
    def block_bytes(self) -> int:
        """How much is best read with one call."""

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill the parts, one after the other, from a position of the file, or raise StorageError."""


class Storage(Protocol):
    """Files below one place, addressed by relative names with ``/``. All methods but ``delete`` raise StorageError."""

    def where(self, name: str = "") -> str:
        """The path or URL of a file, or of the place itself: for messages, and for ``open_storage``."""

    def inside(self, folder: str) -> Storage:
        """A folder as a place of its own, whether it is there or not."""

    def size_bytes(self, name: str) -> int | None:
        """Size of a regular file, or None if there is none."""

    def sizes_bytes(self, names: Sequence[str]) -> list[int | None]:
        """``size_bytes`` of many, with as few requests as possible."""

    def modified_ns(self, name: str) -> int:
        """When a file was last written, in nanoseconds since the epoch; now, if that is not known."""

    def names(self, folder: str = "") -> list[str]:
        """Relative names of the files directly in a folder, sorted; empty if there is no such folder."""

    def folders(self) -> list[str]:
        """Names of the folders directly in this place, sorted."""

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Exactly ``size_bytes`` bytes."""
        buffer = bytearray(size_bytes)
        with self.reader(name) as reader:
            reader.read_into([memoryview(buffer)], offset_bytes)
        return bytes(buffer)

    def reader(self, name: str) -> AbstractContextManager[Reader]:
        """A file for positioned reads, from any thread."""

    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> AbstractContextManager[Sink]:
        """A new file, durable when the block ends without error. With an error it is not there, or is not whole.

        Args:
            name: relative name.
            direct: write past the page cache, where there is one and the file system takes it.
            about_bytes: how large it will be, as far as that is known.
        """

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replace a file as a whole: a reader sees the old bytes or the new ones, also after a crash."""

    def delete(self, name: str) -> None:
        """Remove a file if it is there; a failure to remove is not an error."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and the files directly in it, as far as possible."""

    def delete_if_empty(self, folder: str = "") -> None:
        """Remove a folder in which nothing is left; where folders are but parts of names there is nothing to do."""

    def hold(self, name: str) -> Callable[[], None] | None:
        """Keep other processes from holding the same name until the result is called, or this process is gone.

        Returns:
            None if another process holds it. Where there are no locks, nobody is kept out.
        """


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """The place that a path or URL names. Nothing is looked at yet, nothing is made.

    Raises:
        StorageError: a ``pathlib.Path`` made of a URL, which has lost a slash.
    """
    text = os.fspath(where)
    if is_url(text) and not text.startswith(_FILE_SCHEME):
        from unickpt.object_store import FsspecStorage

        return FsspecStorage(text)
    from unickpt.posix import PosixStorage

    if not isinstance(where, str) and _BROKEN_URL.match(text):
        raise StorageError(f"{text}: a pathlib.Path cannot hold a URL (it joins the slashes); give it as a string")
    return PosixStorage(text.removeprefix(_FILE_SCHEME))


def usable(where: str) -> str:
    """Why a place cannot be used with what is installed here, or ''. Nothing is looked at there."""
    if not is_url(where) or where.startswith(_FILE_SCHEME):
        return ""
    from unickpt import object_store

    return object_store.problem(where)


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether this names a place by ``scheme://``, and not a path."""
    return _URL.match(os.fspath(where)) is not None


def absolute(where: str) -> str:
    """The same place whatever the working directory will be; a URL stays as it is."""
    return where.rstrip("/") if is_url(where) else os.path.abspath(where)


def join(where: str, name: str) -> str:
    """A file or folder in a place."""
    return f"{where.rstrip('/')}/{name}" if is_url(where) else os.path.join(where, name)


def split(where: str) -> tuple[str, str]:
    """The folder that something is in, and its name there."""
    folder, _, name = where.rstrip("/").rpartition("/")
    return folder, name


def read_text(storage: Storage, name: str) -> str | None:
    """A file of one short line (``latest`` and the like) without the white space around it, or None if there is none."""
    size = storage.size_bytes(name)
    if size is None:
        return None
    return storage.read(name, 0, min(size, _MAX_TEXT_BYTES)).decode(errors="replace").strip()
