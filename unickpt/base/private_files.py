"""Files and folders that other users of the machine cannot create, redirect or read. All users can write to shared memory.

Every file is created under a random name (``O_EXCL``, links are not followed) and moved into place. Every folder is created
with mode 0700, or its owner and mode are checked before use. Readers accept only regular files of the expected owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

SHARED_MEMORY = Path("/dev/shm")
TOKEN = "[0-9a-f]{32}"  # pattern of what nobody guesses: ``secrets.token_hex(16)`` in the name of a folder or an address
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking, because opening a FIFO waits for a writer
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def free_bytes(folder: Path) -> int:
    """Return the room on the file system of a folder, or of the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def more_room(folder: Path) -> str:
    """Return what to do if a folder has too little room, for a message."""
    if folder.is_relative_to(SHARED_MEMORY):
        return (
            "Enlarge /dev/shm (docker run --shm-size=1g; in Kubernetes a volume emptyDir with medium: Memory at /dev/shm; else "
            "mount -o remount,size=1g /dev/shm)"
        )
    return f"Free memory or disk space at {folder}"


def no_room(path: Path, size_bytes: int, err: OSError) -> str:
    """Return what a message says about a file that could not get its memory."""
    why = f"cannot take {size_bytes:,} bytes of memory ({err.strerror or err})"
    if err.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: {why}"
    return f"{path}: {why}; {path.parent} has {free_bytes(path.parent):,} bytes free. {more_room(path.parent)}"


def file_name(text: str) -> str:
    """Return a text with ``_`` for each character that has a meaning in paths or shells."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def make_folder(path: Path) -> None:
    """Create a folder that only this user can enter, or check an existing one. Use it in directories shared by all users.

    Raises:
        PermissionError: the path is a link or not a folder, belongs to another user, or is open to other users.
        OSError: the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check_folder(path, os.lstat(path), _OTHERS, (os.geteuid(),))


def check_folder(path: Path) -> None:
    """Check a folder that another process of this user has created with ``make_folder``. Raises OSError, as that does."""
    _check_folder(path, os.lstat(path), _OTHERS, (os.geteuid(),))


def make_named_folder(path: Path) -> None:
    """Create or check a folder that the user has named. Other users may read it, and its path may contain links.

    Raises:
        PermissionError: the path is not a folder, belongs to another user, or other users can write to it.
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
    """Create an empty file with mode 0600. An existing file or link at ``path`` is an error."""
    return os.fdopen(os.open(path, _CREATE, 0o600), "wb+", buffering=0)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Create a file that is moved to ``path`` when the block ends. A link at ``path`` is replaced, not followed."""
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
    """Append lines to a file of this user. A missing file is created. After a line that was cut they begin with a new line.

    Raises:
        OSError: the file cannot be opened, is a link, or is not a regular file of this user with a single hard link, or only a
            part could be written, because the disk is full.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise PermissionError(f"{path} is not a regular file of user {os.geteuid()} with a single hard link")
        if found.st_size and os.pread(file.fileno(), 1, found.st_size - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file that belongs to the owner of its folder or to this user. Links are not followed.

    Raises:
        PermissionError: the path is a link, not a regular file, or belongs to another user.
        OSError: the file cannot be opened.
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
    """Return the text of a small file opened by ``open_regular``, or '' if it is missing or refused."""
    try:
        with open_regular(path) as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def own_folders(parent: Path, prefix: str) -> list[Path]:
    """Return the sorted folders of this user whose names begin with ``prefix``, without links."""
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if entry.name.startswith(prefix) and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                    found.append(Path(entry.path))
    return sorted(found)
