"""Storage in an object store, through fsspec: S3 and compatible stores, Google Cloud, Azure, and others.

An object becomes visible when its upload is complete, so replacing one needs no rename. A large object is
uploaded in parts, and the store discards the parts of an aborted upload. Credentials, endpoint and other
settings are those of fsspec (docs/guides/object-stores.md). fsspec is imported on the first use of a URL.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from unickpt.base.errors import StorageError
from unickpt.base.installation import extra_command
from unickpt.checkpoint.storage.base import Reader, Sink, Storage

PART_BYTES = 32 << 20  # part of a multipart upload; S3 allows 5 MiB to 5 GiB, and a part is in memory twice during the upload
MAX_PARTS = 9_000  # S3 allows 10,000
_BLOCK_BYTES = 16 << 20  # one ranged read; larger reads amortise the latency of a request

T = TypeVar("T")

_filesystems: dict[tuple[str, int], Any] = {}
_unfinished: dict[str, Any] = {}  # failed uploads that are not aborted yet, by URL
_lock = threading.Lock()


def unusable_reason(url: str) -> str:
    """Return why this machine cannot use URLs of this scheme, or ''. No request is sent."""
    try:
        _filesystem(url)
    except StorageError as err:
        return str(err)
    return ""


def _filesystem(url: str) -> Any:
    """Return fsspec's file system for a URL. All threads of the process share it; it does not cache listings."""
    scheme, _, rest = url.partition("://")
    key = f"{scheme}://{rest.partition('/')[0]}", os.getpid()  # a forked child cannot use its parent's connections
    with _lock:
        if key not in _filesystems:
            try:
                import fsspec

                _filesystems[key] = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)[0]
            except ImportError as err:
                missing = next((e.name for e in (err.__cause__, err) if isinstance(e, ImportError) and e.name), "fsspec")
                command = extra_command("object-store") if missing == "fsspec" else f"pip install '{missing}'"
                raise StorageError(f"{url}: needs a package that is not installed: {command}") from err
            except Exception as err:
                raise StorageError(f"{url}: cannot be used ({_error_text(err)})") from err
        return _filesystems[key]


def _error_text(err: BaseException) -> str:
    """Return the class and the message of an error."""
    text = (getattr(err, "strerror", None) or str(err)).strip()
    kind = type(err).__name__
    return f"{kind}: {text}" if text else kind


class FsspecStorage(Storage):
    """Objects below one URL. The constructor sends no request; errors appear on first use."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def where(self, name: str = "") -> str:
        return f"{self.url}/{name}" if name else self.url

    def subfolder(self, folder: str) -> FsspecStorage:
        return FsspecStorage(self.where(folder))

    def _call(self, name: str, verb: str, operation: Callable[[Any, str], T], missing: T | None = None) -> T:
        """Run an operation on an object. If the object does not exist, return ``missing`` unless that is None.

        Raises:
            StorageError: the operation failed; ``verb`` is its past participle in the message.
        """
        filesystem = _filesystem(self.url)
        try:
            filesystem.invalidate_cache()  # other processes write to the same store
            return operation(filesystem, filesystem._strip_protocol(self.where(name)))
        except Exception as err:
            if missing is not None and isinstance(err, (FileNotFoundError, NotADirectoryError)):
                return missing
            raise StorageError(f"{self.where(name)}: cannot be {verb} ({_error_text(err)})") from err

    def size_bytes(self, name: str) -> int | None:
        nothing: dict[str, Any] = {}
        info = self._call(name, "examined", lambda fs, path: dict(fs.info(path)), missing=nothing)
        return int(info["size"]) if info.get("type") == "file" else None

    def sizes_bytes(self, names: Sequence[str]) -> list[int | None]:
        known: dict[str, int] = {}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            known |= {name: int(entry["size"]) for name, entry in self._entries(folder, "file")}
        return [known.get(name) for name in names]

    def modified_ns(self, name: str) -> int:
        try:
            return int(self._call(name, "examined", lambda fs, path: fs.modified(path)).timestamp() * 1e9)
        except StorageError:  # the object is missing, or the store does not report the time
            return time.time_ns()

    def names(self, folder: str = "") -> list[str]:
        return [name for name, _ in self._entries(folder, "file")]

    def folders(self) -> list[str]:
        return [name for name, _ in self._entries("", "directory")]

    def _entries(self, folder: str, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Return name and description of the entries of one kind directly in a folder, sorted by name."""

        def listed(filesystem: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
            base = path.rstrip("/")
            found = []
            for entry in filesystem.ls(path, detail=True):
                full = str(entry["name"]).rstrip("/")
                if entry["type"] == kind and full != base:  # some stores list the marker object of the folder itself
                    name = full.rpartition("/")[2]
                    found.append((f"{folder}/{name}" if folder else name, entry))
            return sorted(found, key=lambda item: item[0])

        nothing: list[tuple[str, dict[str, Any]]] = []
        return self._call(folder, "listed", listed, missing=nothing)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        yield _RangeReader(self, name)

    def range_of(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)`` of an object, or fewer if the object ends earlier."""
        return self._call(name, f"read at byte {begin}", lambda fs, path: bytes(fs.cat_file(path, start=begin, end=end)))

    @contextlib.contextmanager
    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> Iterator[Sink]:  # noqa: ARG002
        """Create an object. It becomes visible when the block ends without error; an error aborts the upload.

        An object smaller than one part is written with a single request.
        """
        part_bytes = max(PART_BYTES, -(-about_bytes // MAX_PARTS))
        file = self._call(name, "written", lambda fs, path: fs.open(path, "wb", block_size=part_bytes))
        try:
            yield _PartSink(self.where(name), file, part_bytes)
            try:
                file.close()
            except Exception as err:
                raise StorageError(f"{self.where(name)}: cannot be written ({_error_text(err)})") from err
        except BaseException:
            with contextlib.suppress(AttributeError):
                file.closed = True  # otherwise its finalizer completes the upload
            _unfinished[self.where(name)] = file
            _abort(self.where(name))
            raise
        for url in list(_unfinished):  # the store is reachable now
            _abort(url)

    def write_atomic(self, name: str, data: bytes) -> None:
        self._call(name, "written", lambda fs, path: fs.pipe_file(path, data))

    def delete(self, name: str) -> None:
        with contextlib.suppress(StorageError):
            self._call(name, "deleted", lambda fs, path: fs.rm_file(path))

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(StorageError):
            for name in self.names(folder):
                self.delete(name)

    def delete_if_empty(self, folder: str = "") -> None:
        """Do nothing: in an object store a folder is part of a name."""

    def try_lock(self, name: str) -> Callable[[], None]:  # noqa: ARG002
        """Grant every lock: object stores have none. Two jobs must use two folders."""
        return lambda: None


def _abort(url: str) -> None:
    """Abort a failed upload, so that the store discards its parts. If that fails, the next upload tries again."""
    file = _unfinished.get(url)
    with contextlib.suppress(Exception):
        if file is not None:
            file.discard()
            _unfinished.pop(url, None)


class _PartSink:
    """Sink that splits the data into parts of equal size, as some stores require."""

    def __init__(self, url: str, file: Any, part_bytes: int) -> None:
        self._url, self._file, self._part_bytes = url, file, part_bytes
        self._filled = 0  # bytes in the current part

    def write(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            at = 0
            while at < len(part):
                count = min(len(part) - at, self._part_bytes - self._filled)
                try:
                    self._file.write(part[at : at + count])
                except Exception as err:
                    raise StorageError(f"{self._url}: cannot be written ({_error_text(err)})") from err
                at += count
                self._filled = (self._filled + count) % self._part_bytes


class _RangeReader:
    block_bytes = _BLOCK_BYTES

    def __init__(self, storage: FsspecStorage, name: str) -> None:
        self._storage, self._name = storage, name

    @property
    def path(self) -> str:
        return self._storage.where(self._name)

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        wanted = sum(map(len, parts))
        if not wanted:
            return
        data = memoryview(self._storage.range_of(self._name, offset_bytes, offset_bytes + wanted))
        if len(data) != wanted:
            end = offset_bytes + len(data)
            raise StorageError(f"{self.path}: ends at byte {end}, expected {wanted - len(data)} more bytes")
        at = 0
        for part in parts:
            part[:] = data[at : at + len(part)]
            at += len(part)
