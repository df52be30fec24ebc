"""Storage in an object store, through fsspec: S3 and what speaks its protocol, Google Cloud, Azure, and others.

An object appears when its upload is complete, or not at all, so replacing one needs no rename. A
large one is uploaded in parts, which the store forgets if the upload is aborted. Credentials,
endpoint and other settings are fsspec's own (docs/storage.md). fsspec is imported when a URL is used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from unickpt.errors import StorageError
from unickpt.storage import Reader, Sink, Storage

PART_BYTES = 32 << 20  # of a multipart upload: the store takes 5 MiB to 5 GiB, and a part is held twice while it is sent
MAX_PARTS = 9_000  # the store takes 10,000
_BLOCK_BYTES = 16 << 20  # of one ranged read: each request has to wait for its first byte

T = TypeVar("T")

_filesystems: dict[tuple[str, int], Any] = {}
_unfinished: dict[str, Any] = {}  # uploads that failed and could not be aborted, by URL
_lock = threading.Lock()


def problem(url: str) -> str:
    """Why URLs of this kind cannot be used on this machine, or ''. The store itself is not asked."""
    try:
        _filesystem(url)
    except StorageError as err:
        return str(err)
    return ""


def _filesystem(url: str) -> Any:
    """fsspec's file system for a URL: one for all threads of this process, without a memory of what it has listed."""
    scheme, _, rest = url.partition("://")
    key = f"{scheme}://{rest.partition('/')[0]}", os.getpid()  # a forked child cannot use its parent's connections
    with _lock:
        if key not in _filesystems:
            try:
                import fsspec

                _filesystems[key] = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)[0]
            except ImportError as err:
                missing = next((e.name for e in (err.__cause__, err) if isinstance(e, ImportError) and e.name), "fsspec")
                package = "unickpt[object-store]" if missing == "fsspec" else missing
                raise StorageError(f"{url}: needs a package that is not installed: pip install '{package}'") from err
            except Exception as err:
                raise StorageError(f"{url}: cannot be used ({_said(err)})") from err
        return _filesystems[key]


def _said(err: BaseException) -> str:
    """What the store, or the way to it, said."""
    text = (getattr(err, "strerror", None) or str(err)).strip()
    kind = type(err).__name__
    return f"{kind}: {text}" if text else kind


class FsspecStorage(Storage):
    """Objects whose names begin with a URL. Making one touches nothing; what is wrong shows when it is used."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def where(self, name: str = "") -> str:
        return f"{self.url}/{name}" if name else self.url

    def inside(self, folder: str) -> FsspecStorage:
        return FsspecStorage(self.where(folder))

    def _ask(self, name: str, verb: str, question: Callable[[Any, str], T], missing: T | None = None) -> T:
        """Ask the file system about an object; what is not there gives ``missing``, if that is an answer."""
        filesystem = _filesystem(self.url)
        try:
            filesystem.invalidate_cache()  # others write here too
            return question(filesystem, filesystem._strip_protocol(self.where(name)))
        except Exception as err:
            if missing is not None and isinstance(err, (FileNotFoundError, NotADirectoryError)):
                return missing
            raise StorageError(f"{self.where(name)}: cannot be {verb} ({_said(err)})") from err

    def size_bytes(self, name: str) -> int | None:
        nothing: dict[str, Any] = {}
        info = self._ask(name, "examined", lambda fs, path: dict(fs.info(path)), missing=nothing)
        return int(info["size"]) if info.get("type") == "file" else None

    def sizes_bytes(self, names: Sequence[str]) -> list[int | None]:
        known: dict[str, int] = {}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            known |= {name: int(entry["size"]) for name, entry in self._entries(folder, "file")}
        return [known.get(name) for name in names]

    def modified_ns(self, name: str) -> int:
        try:
            return int(self._ask(name, "examined", lambda fs, path: fs.modified(path)).timestamp() * 1e9)
        except StorageError:  # gone, or a store that does not say
            return time.time_ns()

    def names(self, folder: str = "") -> list[str]:
        return [name for name, _ in self._entries(folder, "file")]

    def folders(self) -> list[str]:
        return [name for name, _ in self._entries("", "directory")]

    def _entries(self, folder: str, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Names and descriptions of what is directly in a folder, sorted."""

        def listed(filesystem: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
            base = path.rstrip("/")
            found = []
            for entry in filesystem.ls(path, detail=True):
                full = str(entry["name"]).rstrip("/")
                if entry["type"] == kind and full != base:  # some stores list the folder's own marker
                    name = full.rpartition("/")[2]
                    found.append((f"{folder}/{name}" if folder else name, entry))
            return sorted(found, key=lambda item: item[0])

        nothing: list[tuple[str, dict[str, Any]]] = []
        return self._ask(folder, "listed", listed, missing=nothing)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        yield _RangeReader(self, name)

    def range_of(self, name: str, begin: int, end: int) -> bytes:
        """The bytes of an object in a half-open range, or fewer if it ends before."""
        return self._ask(name, f"read at byte {begin}", lambda fs, path: bytes(fs.cat_file(path, start=begin, end=end)))

    @contextlib.contextmanager
    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> Iterator[Sink]:  # noqa: ARG002
        """An object that appears when the block ends without error; with an error its upload is aborted.

        One that is smaller than a part is put with a single request.
        """
        part_bytes = max(PART_BYTES, -(-about_bytes // MAX_PARTS))
        file = self._ask(name, "written", lambda fs, path: fs.open(path, "wb", block_size=part_bytes))
        try:
            yield _PartSink(self.where(name), file, part_bytes)
            try:
                file.close()
            except Exception as err:
                raise StorageError(f"{self.where(name)}: cannot be written ({_said(err)})") from err
        except BaseException:
            with contextlib.suppress(AttributeError):
                file.closed = True  # or its finalizer would complete the upload
            _unfinished[self.where(name)] = file
            _abort(self.where(name))
            raise
        for url in list(_unfinished):  # the store can be reached now
            _abort(url)

    def write_atomic(self, name: str, data: bytes) -> None:
        self._ask(name, "written", lambda fs, path: fs.pipe_file(path, data))

    def delete(self, name: str) -> None:
        with contextlib.suppress(StorageError):
            self._ask(name, "deleted", lambda fs, path: fs.rm_file(path))

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(StorageError):
            for name in self.names(folder):
                self.delete(name)

    def delete_if_empty(self, folder: str = "") -> None:
        """Folders are but parts of names."""

    def hold(self, name: str) -> Callable[[], None]:  # noqa: ARG002
        """There are no locks: two jobs need two places."""
        return lambda: None


def _abort(url: str) -> None:
    """Let the store forget the parts of an upload that failed. If it cannot be reached, the next upload tries again."""
    file = _unfinished.get(url)
    with contextlib.suppress(Exception):
        if file is not None:
            file.discard()
            _unfinished.pop(url, None)


class _PartSink:
    """Cuts what is written into parts of equal size, which some stores insist on."""

    def __init__(self, url: str, file: Any, part_bytes: int) -> None:
        self._url, self._file, self._part_bytes = url, file, part_bytes
        self._filled = 0  # bytes of the part that is being collected

    def write(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            at = 0
            while at < len(part):
                count = min(len(part) - at, self._part_bytes - self._filled)
                try:
                    self._file.write(part[at : at + count])
                except Exception as err:
                    raise StorageError(f"{self._url}: cannot be written ({_said(err)})") from err
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
            raise StorageError(f"{self.path}: ends at byte {end}, {wanted - len(data)} bytes too early")
        at = 0
        for part in parts:
            part[:] = data[at : at + len(part)]
            at += len(part)
