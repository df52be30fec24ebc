"""Files and folders that another user of the machine cannot plant, redirect or read: shared memory is writable by everybody.

Every file is created under a random name (``O_EXCL``, no link is followed) and moved into place. Every folder is created with
mode 0700, or its owner and mode are checked before it is used. A reader takes regular files of the expected owner only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a FIFO would wait for a writer
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folder(path: Path) -> None:
    """Create a folder that only this user can enter, or check one that is there. For folders in a directory of all users.

    Raises:
        PermissionError: what is there is a link or no folder, belongs to another user, or is open to others.
        OSError: the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check_folder(path, os.lstat(path), _OTHERS, (os.geteuid(),))


def make_named_folder(path: Path) -> None:
    """The same for a folder that the user has named: others may look into it, and it may be reached through links.

    Raises:
        PermissionError: it is no folder, belongs to another user, or others can write to it.
        OSError: the folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check_folder(path, os.stat(path), _OTHERS_WRITE, (os.geteuid(), 0))


def _check_folder(path: Path, found: os.stat_result, forbidden: int, owners: Collection[int]) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is a link or a file, not a folder. Remove it, or name a folder of your own")
    if found.st_uid not in owners:
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()} of this process. Name a folder of your own; "
            "one that does not exist is created with mode 0700"
        )
    if found.st_mode & forbidden:
        raise PermissionError(
            f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), who could plant files there. "
            "Run chmod 700 on it, or name a folder that does not exist: it is created with mode 0700"
        )


def create(path: Path) -> IO[bytes]:
    """A new, empty file, readable and writable by its owner only. Whatever is at ``path`` is an error, also a link."""
    return os.fdopen(os.open(path, _CREATE, 0o600), "wb+", buffering=0)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is moved to ``path`` when the block ends; a link at ``path`` is replaced, not followed."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with create(fresh) as file:
        try:
            yield file
            fresh.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise


def append(path: Path, data: bytes) -> None:
    """Append to a file of this user; create it if there is none.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file of this user with one name.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise PermissionError(f"{path} is not a regular file of user {os.geteuid()} with one name")
        file.write(data)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading: a regular one that belongs to the owner of its folder or to this user. Links are not followed.

    Raises:
        PermissionError: it is something else; says what.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        if path.is_symlink():
            raise PermissionError("a link, which is not followed") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("not a regular file")
        if found.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
            raise PermissionError(f"belongs to user {found.st_uid}, the folder to another user")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a small file as ``open_regular`` opens it; '' if that is refused or there is none."""
    try:
        with open_regular(path) as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def own_folders(parent: Path, prefix: str) -> list[Path]:
    """Folders of this user whose names begin with ``prefix``; links are left out."""
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if entry.name.startswith(prefix) and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                    found.append(Path(entry.path))
    return sorted(found)
