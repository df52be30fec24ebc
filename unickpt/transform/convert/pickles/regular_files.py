"""Safe opening of files in a foreign checkpoint: regular files only, and paths in a file stay in its folder.

There are two rules. A file found by listing the user's folder may be a symbolic link: users and the Hugging Face cache create
such folders. A path *inside* a file must lead to a file below that folder after all links are resolved; in a snapshot of the
Hugging Face cache, it may also lead to the blobs of the same repository. The second rule also holds for files that are copied
byte for byte, as ``export --config`` does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, UnsafePathError
from unickpt.checkpoint.format.json_text import parse_json
from unickpt.checkpoint.format.manifest import check_path
from unickpt.checkpoint.storage.base import Storage

MAX_JSON_BYTES = 64 << 20  # an index of transformers with 100,000 tensors has 8 MB
_COPY_BYTES = 8 << 20
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def open_regular(path: Path) -> int:
    """Return a descriptor for reading. Pipes and devices neither block nor are read.

    Raises:
        FormatError: not a regular file.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FormatError(f"{path}: is not a regular file")


def copy_regular(path: Path, storage: Storage, name: str) -> None:
    """Copy a regular file, block by block.

    Raises:
        FormatError: not a regular file.
        OSError, StorageError: it cannot be read or written.
    """
    with os.fdopen(open_regular(path), "rb") as file, storage.create(name) as sink:
        while block := file.read(_COPY_BYTES):
            sink.write([memoryview(block)])


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a file that contains a JSON object.

    Raises:
        FormatError: not a regular file, too large, or not a JSON object.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"{path}: has more than {MAX_JSON_BYTES:,} bytes")
    found = parse_json(data, where=str(path), strict=False)  # transformers may write Infinity
    if not isinstance(found, dict):
        raise FormatError(f"{path}: contains a {type(found).__name__}; expected a JSON object")
    return found


def named_file(folder: Path, name: str, where: str) -> Path:
    """Return the path of a file that is named inside a file of the folder.

    Args:
        folder: folder of the checkpoint.
        name: relative path, as written in the file.
        where: name of that file, for messages.

    Raises:
        UnsafePathError: the path leaves the folder by ``..`` or by a symbolic link.
        FormatError: there is no regular file.
    """
    path = folder / check_path(name, where=where)
    try:
        check_inside(folder, path)
    except UnsafePathError as err:
        raise UnsafePathError(f"{err}; {where} names it") from None
    except FormatError as err:
        raise FormatError(f"{err}; {where} names it") from None
    return path


def check_inside(folder: Path, path: Path) -> None:
    """Check a file that is read or copied because something in its folder names it.

    Raises:
        UnsafePathError: a symbolic link leaves the folder.
        FormatError: there is no regular file.
    """
    try:
        target, root = path.resolve(strict=True), folder.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError, ValueError) as err:
        what = "does not exist" if isinstance(err, FileNotFoundError) else f"cannot be examined ({err})"
        raise FormatError(f"{path}: {what}") from None
    blobs = root.parent.parent / _BLOBS if root.parent.name == _SNAPSHOTS else None
    if not target.is_relative_to(root) and (blobs is None or target.parent != blobs):
        raise UnsafePathError(f"{path}: leads to {target}, outside of {root}")
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path}: is not a regular file")
