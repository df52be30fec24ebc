"""Choice of the storage backend for a path or URL."""

from __future__ import annotations

import os
import re

from unickpt.base.errors import StorageError
from unickpt.checkpoint.storage.base import Storage, is_url

_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_FILE_SCHEME = "file://"


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path or URL. This neither reads nor creates anything.

    Raises:
        StorageError: ``where`` is a ``pathlib.Path`` made from a URL, which has lost a slash.
    """
    text = os.fspath(where)
    if is_url(text) and not text.startswith(_FILE_SCHEME):
        from unickpt.checkpoint.storage.fsspec import FsspecStorage

        return FsspecStorage(text)
    from unickpt.checkpoint.storage.posix import PosixStorage

    if not isinstance(where, str) and _BROKEN_URL.match(text):
        raise StorageError(f"{text}: pathlib.Path merges the slashes of a URL; pass the URL as a string")
    return PosixStorage(text.removeprefix(_FILE_SCHEME))


def unusable_reason(where: str) -> str:
    """Return why this machine cannot use a location (for example a missing package), or ''. No request is sent."""
    if not is_url(where) or where.startswith(_FILE_SCHEME):
        return ""
    from unickpt.checkpoint.storage import fsspec

    return fsspec.unusable_reason(where)
