"""Opening the files of somebody else's checkpoint: regular files only, and what a file names lies in its own folder.

Two rules. A file that is found by listing the folder which the user names may be a symbolic link: users and the cache of the
Hugging Face hub make such folders. A path that is written *inside* a file must lead to a file below that folder after all links
are resolved; in a snapshot of the hub's cache, also to the blobs of the same repository. The same holds for files that are
copied byte for byte, as ``export --config`` does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unickpt.errors import FormatError, UnsafePathError
from unickpt.json_text import parse_json
from unickpt.manifest import check_path

MAX_JSON_BYTES = 64 << 20  # an index of transformers with 100,000 tensors has 8 MB
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def open_regular(path: Path) -> int:
    """A descriptor for reading. A pipe or a device neither blocks nor is read.

    Raises:
        FormatError: it is not a regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FormatError(f"{path}: is not a regular file")


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object in a file.

    Raises:
        FormatError: it is not a regular file, too large, or not a JSON object.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"{path}: has more than {MAX_JSON_BYTES:,} bytes")
    found = parse_json(data, where=str(path), strict=False)  # transformers writes Infinity, for one
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds a {type(found).__name__}, not a JSON object")
    return found


def named_file(folder: Path, name: str, where: str) -> Path:
    """A file that a file of the folder names.

    Args:
        folder: of the checkpoint.
        name: path relative to it, as the file has it.
        where: names that file in messages.

    Raises:
        UnsafePathError: the path leaves the folder, by ``..`` or by a symbolic link.
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
    """Check a file whose bytes or tensors are copied because something in its folder says so.

    Raises:
        UnsafePathError: a symbolic link leads out of the folder.
        FormatError: there is no regular file.
    """
    try:
        target, root = path.resolve(strict=True), folder.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError, ValueError) as err:
        what = "is not there" if isinstance(err, FileNotFoundError) else f"cannot be examined ({err})"
        raise FormatError(f"{path}: {what}") from None
    blobs = root.parent.parent / _BLOBS if root.parent.name == _SNAPSHOTS else None
    if not target.is_relative_to(root) and (blobs is None or target.parent != blobs):
        raise UnsafePathError(f"{path}: leads to {target}, outside of {root}")
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path}: is not a regular file")
