"""Storage in a directory of a POSIX file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from unickpt.base.errors import StorageError, UnsafePathError
from unickpt.checkpoint.storage import direct_io
from unickpt.checkpoint.storage.base import Reader, Sink, Storage
from unickpt.checkpoint.storage.direct_io import DirectSink

_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS, errno.EACCES, errno.EPERM}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}
_BLOCK_BYTES = 256 << 10  # fits into the cache of a core, so a checksum does not read the block from memory again
_CALL_PARTS = min(os.sysconf("SC_IOV_MAX"), 1024)  # buffers that one system call fills


class PosixStorage(Storage):
    """Files below one directory, addressed by relative paths with ``/``."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))  # stays valid after a change of the working directory
        self._text = str(self.root).rstrip("/")
        self._unsynced: list[Path] = []  # folders with new ones in them, whose entries are not durable yet

    def __str__(self) -> str:
        return str(self.root)

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    def subfolder(self, folder: str) -> PosixStorage:
        return PosixStorage(self.root / folder)

    def path(self, name: str) -> Path:
        """Return the absolute path of a file.

        Raises:
            UnsafePathError: a symbolic link leads out of the root, or the path cannot be resolved.
        """
        path = self.root / name
        if self._without_links(name):
            return path
        try:
            inside = path.resolve().is_relative_to(self.root.resolve())
        except (OSError, RuntimeError, ValueError) as err:  # a link to itself, an invalid name
            raise UnsafePathError(f"{path} cannot be resolved ({err})") from None
        if not inside:
            raise UnsafePathError(f"{path} leads outside {self.root}")
        return path

    def _without_links(self, name: str) -> bool:
        """Whether no component of the name of a file is a symbolic link, as far as they exist. It is then inside the root."""
        parts = name.split("/") if name else []
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            return False
        at = self._text
        try:
            for part in parts:
                at = f"{at}/{part}"
                if stat.S_ISLNK(os.lstat(at).st_mode):
                    return False
        except FileNotFoundError:  # nothing behind it exists
            return True
        except (OSError, ValueError):
            return False
        return True

    def _examine(self, name: str) -> os.stat_result | None:
        """Return what a file is, if no component of its name is a symbolic link. It is then inside the root.

        This takes a few microseconds, ``path`` without it a hundred. None: ``path`` has to decide.
        """
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts):
            return None
        at, found = self._text, None
        try:
            for part in parts:
                at = f"{at}/{part}"
                found = os.lstat(at)
                if stat.S_ISLNK(found.st_mode):
                    return None
        except (OSError, ValueError):  # it does not exist, or the name is invalid
            return None
        return found

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a regular file, or None if it does not exist."""
        found = self._examine(name)
        if found is not None:
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        path = self.path(name)
        try:
            found = _status(path)
            return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None
        except OSError as err:
            raise StorageError(f"{path}: cannot be examined ({err.strerror or err})") from err

    def sizes_bytes(self, names: Sequence[str]) -> list[int | None]:
        return [self.size_bytes(name) for name in names]

    def modified_ns(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return self.path(name).stat().st_mtime_ns
        return time.time_ns()

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        path = self.path(name)
        with _opened_to_read(path) as descriptor:
            parts, at, end = [], offset_bytes, offset_bytes + size_bytes
            while at < end:
                try:
                    part = os.pread(descriptor, end - at, at)
                except OSError as err:
                    raise StorageError(f"{path}: cannot be read at byte {at} ({err.strerror or err})") from err
                if not part:
                    raise StorageError(f"{path}: ends at byte {at}, expected {end - at} more bytes")
                parts.append(part)
                at += len(part)
            return b"".join(parts)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        """Open a file for positioned reads from any thread."""
        path = self.path(name)
        with _opened_to_read(path) as descriptor:
            yield _DescriptorReader(descriptor, str(path))

    @contextlib.contextmanager
    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> Iterator[Sink]:  # noqa: ARG002
        """Create a file. It is durable (fsync of file and directory) when the block ends without error.

        After an error it does not exist. An existing file of this name is unlinked first, because a rank of a
        killed job may still write to it, and because it may have other hard links.
        """
        path = self.path(name)
        try:
            self._make_folders(path.parent)
            self._sync_folders()
            path.unlink(missing_ok=True)
            try:
                with _new_file(path, direct=direct) as sink:
                    yield sink
                _sync_directory(path.parent)
            except BaseException:  # an incomplete file only takes space
                self.delete(name)
                raise
        except OSError as err:
            raise StorageError(f"{path}: cannot be written ({err.strerror or err})") from err

    def write_atomic(self, name: str, data: bytes) -> None:
        """Replace a file atomically: readers see the old bytes or the new ones, also after a crash.

        Raises:
            StorageError: the write failed. The file has its old bytes, unless only the final sync of the
                directory failed.
        """
        temporary = f"{name}.tmp"
        with self.create(temporary) as sink:
            sink.write([memoryview(data)])
        try:
            path = self.path(name)
            try:
                os.replace(self.path(temporary), path)
                _sync_directory(path.parent)
            except OSError as err:
                raise StorageError(f"{path}: cannot be replaced ({err.strerror or err})") from err
        except BaseException:
            self.delete(temporary)
            raise

    def names(self, folder: str = "") -> list[str]:
        prefix = f"{folder}/" if folder else ""
        return [prefix + name for name in self._entries(folder, stat.S_ISREG)]

    def folders(self) -> list[str]:
        return self._entries("", stat.S_ISDIR)

    def _entries(self, folder: str, wanted: Callable[[int], bool]) -> list[str]:
        path = self.path(folder)
        try:
            return sorted(entry.name for entry in path.iterdir() if _is(wanted, entry)) if _is(stat.S_ISDIR, path) else []
        except OSError as err:
            raise StorageError(f"{path}: cannot be listed ({err.strerror or err})") from err

    def delete(self, name: str) -> None:
        """Remove a file if it exists. A failure is ignored."""
        with contextlib.suppress(OSError, StorageError, UnsafePathError):
            self.path(name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and the files directly in it. Failures are ignored."""
        with contextlib.suppress(StorageError, UnsafePathError):
            for name in self.names(folder):
                self.delete(name)
        self.delete_if_empty(folder)

    def delete_if_empty(self, folder: str = "") -> None:
        with contextlib.suppress(OSError, UnsafePathError):
            self.path(folder).rmdir()

    def try_lock(self, name: str) -> Callable[[], None] | None:
        """As ``Storage.try_lock``. A folder that is made for the file becomes durable with the next file that is created.

        A caller that waits for the lock, such as training, does not wait for the disk.
        """
        path = self.path(name)
        try:
            self._make_folders(path.parent)
            descriptor = _locked(path)
        except OSError:
            return lambda: None
        if descriptor is None:
            return None

        def release() -> None:
            try:
                self.delete(name)
            finally:
                _unlock(descriptor)

        return release

    def _make_folders(self, path: Path) -> None:
        """Create a folder and its parents. Other ranks may create the same ones. ``_sync_folders`` makes them durable."""
        missing = []
        while _status(path) is None and path.parent != path:
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            self._unsynced.append(folder.parent)
            folder.mkdir(exist_ok=True)

    def _sync_folders(self) -> None:
        """Make the folders durable that ``_make_folders`` has made. Raises OSError; the next call then tries again."""
        waiting, self._unsynced = self._unsynced, []
        try:
            for path in waiting:
                _sync_directory(path)
        except OSError:
            self._unsynced = waiting + self._unsynced
            raise


def _status(path: Path) -> os.stat_result | None:
    """Return what a path leads to, or None if there is nothing. Raises OSError if the file system cannot tell.

    From Python 3.14 on, ``Path.is_file`` and its siblings take every error for an absent file.
    """
    try:
        return os.stat(path)
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        raise


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    found = _status(path)
    return found is not None and kind(found.st_mode)


def _locked(path: Path) -> int | None:
    """Create and lock a file. Return its descriptor, or None if another process has the lock.

    Raises OSError if the file system has no locks. Nothing is open or locked then.
    """
    while True:
        descriptor, held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644), False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _has_name(descriptor, path)
        except BlockingIOError:
            return None
        finally:
            if not held:
                _unlock(descriptor)
        if held:
            return descriptor


def _has_name(descriptor: int, path: Path) -> bool:
    """Return whether a path leads to an open file. False: the previous owner has just removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
    except OSError:  # a lock that is held is kept
        return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit, because a forked child also has the descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)


@contextlib.contextmanager
def _new_file(path: Path, *, direct: bool) -> Iterator[Sink]:
    """Open a new file for writing; sync and close it at the end of the block. Raises OSError."""
    descriptor, past_cache = _opened(path, direct=direct)
    try:
        if past_cache:
            sink = DirectSink(descriptor)
            try:
                yield sink
                sink.finish()
            finally:
                sink.close()
        else:
            yield _DescriptorSink(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path, *, direct: bool) -> tuple[int, bool]:
    """Return a descriptor for writing a new file, and whether it bypasses the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct and direct_io.FLAG:
        with contextlib.suppress(OSError):  # no O_DIRECT on this file system; any other error occurs again below
            return os.open(path, flags | direct_io.FLAG, 0o644), True
    return os.open(path, flags, 0o644), False


class _DescriptorSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, parts: Sequence[memoryview]) -> None:
        left = [part for part in parts if len(part)]
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]


@contextlib.contextmanager
def _opened_to_read(path: Path) -> Iterator[int]:
    """Open a regular file and yield the descriptor. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not block on a pipe
    except OSError as err:
        raise StorageError(f"{path}: cannot be opened ({err.strerror or err})") from err
    try:
        if not _is_regular(descriptor, path):
            raise StorageError(f"{path}: not a regular file")
        yield descriptor
    finally:
        with contextlib.suppress(OSError):  # an error does not affect the bytes that were read
            os.close(descriptor)


def _is_regular(descriptor: int, path: Path) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError as err:
        raise StorageError(f"{path}: cannot be examined ({err.strerror or err})") from err


class _DescriptorReader:
    block_bytes = _BLOCK_BYTES

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor, self.path = descriptor, path

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        left = [part for part in parts if len(part)]
        at = offset_bytes
        while left:
            try:
                got = os.preadv(self.descriptor, left[:_CALL_PARTS], at)
            except OSError as err:
                raise StorageError(f"{self.path}: cannot be read at byte {at} ({err.strerror or err})") from err
            if not got:
                short = sum(map(len, left))
                raise StorageError(f"{self.path}: ends at byte {at}, expected {short} more bytes")
            at += got
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def note(self, size_bytes: int) -> None: ...

    def is_cached(self, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0, /) -> bool:
        return direct_io.mostly_cached(self.descriptor, offset_bytes, size_bytes, unknown, every)


def _sync_directory(path: Path) -> None:
    """Make the entries of a directory durable, if the file system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as err:
        if err.errno not in _NO_DIRECTORY_SYNC:
            raise
