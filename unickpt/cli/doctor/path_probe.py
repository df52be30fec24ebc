"""Whether a checkpoint can be written into a folder or URL. Runs in a process of its own: a file system may not answer.

It writes a small file with a name of its own, reads it, and removes it. It creates no folder.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 4096
_MOUNTS = Path("/proc/self/mountinfo")


def main(arguments: Sequence[str]) -> None:
    """Print the facts of the place that the only argument names as one JSON object."""
    from unickpt.checkpoint.storage.base import is_url

    (where,) = arguments
    print(json.dumps(of_url(where) if is_url(where) else of_folder(Path(where))))


def of_folder(path: Path) -> dict[str, Any]:
    """Try a folder, or the nearest folder above it that exists.

    Returns:
        ``tried`` (the folder), ``exists`` (whether it is the one that was asked for), ``filesystem``, ``device``,
        ``free_bytes``, ``direct`` (whether O_DIRECT works; null if nothing can be written), ``problem`` (why nothing can be
        written, or '').
    """
    asked = Path(os.path.abspath(path))
    tried = next(each for each in (asked, *asked.parents) if each.exists())
    found: dict[str, Any] = {"tried": str(tried), "exists": tried == asked, "direct": None, "problem": ""}
    found["filesystem"], found["device"] = mounted(tried)
    try:
        room = os.statvfs(tried)
        found["free_bytes"] = room.f_bavail * room.f_frsize
        if not tried.is_dir():
            raise NotADirectoryError(20, "is a file", str(tried))
        found["direct"] = _written(tried / f".unickpt-doctor-{secrets.token_hex(6)}")
    except OSError as err:
        found["problem"] = f"{err.strerror or err}"
    return found


def _written(file: Path) -> bool:
    """Write, rename and read a file, and return whether ``O_DIRECT`` works. Raises OSError."""
    renamed = file.with_name(f"{file.name}.renamed")
    try:
        with open(file, "xb") as opened:
            opened.write(bytes(_BLOCK_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(file, renamed)
        if len(renamed.read_bytes()) != _BLOCK_BYTES:
            raise OSError(5, "a file that was written has another size")
        return _direct(renamed)
    finally:
        for each in (file, renamed):
            with contextlib.suppress(OSError):
                each.unlink()


def _direct(file: Path) -> bool:
    flag = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(file, os.O_WRONLY | flag)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # at an address that direct I/O takes
            return bool(flag) and os.write(descriptor, block) == _BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(descriptor)


def mounted(path: Path, table: Path = _MOUNTS) -> tuple[str, str]:
    """Return the type of the file system of a path, and what is mounted there."""
    real, best = os.path.realpath(path), ("", "", "")
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            kind, device = after.split()[:2]
            best = point, kind, device  # a later mount at the same point hides the earlier one
    return best[1], best[2]


def of_url(url: str) -> dict[str, Any]:
    """Try an object store: write, read and delete a small object. The result is as for a folder."""
    from unickpt.base.errors import UnickptError
    from unickpt.checkpoint.storage.open import open_storage, unusable_reason

    found: dict[str, Any] = {"tried": url, "exists": None, "filesystem": url.partition("://")[0], "device": "", "direct": None}
    problem = unusable_reason(url)
    if not problem:
        name = f".unickpt-doctor-{secrets.token_hex(6)}"
        storage = open_storage(url)
        try:
            storage.write_atomic(name, bytes(_BLOCK_BYTES))
            if storage.size_bytes(name) != _BLOCK_BYTES:
                problem = "an object that was written has another size"
        except UnickptError as err:
            problem = str(err)
        storage.delete(name)
    return {**found, "free_bytes": None, "problem": problem}
