"""Files of a directory: which names are inside, whatever links there are, and reads of small files."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from tests.jobs.faults.calls import Call, watched
from unickpt.base.errors import StorageError, UnsafePathError
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.format.manifest import FileRecord
from unickpt.checkpoint.save.commit import read_rows
from unickpt.checkpoint.storage.posix import PosixStorage


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """A root with a file, beside a folder and a file that are outside."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "data" / "file").write_bytes(b"0123456789")
    return PosixStorage(root)


def test_a_link_inside_is_followed_and_one_to_the_outside_is_not(storage: PosixStorage) -> None:
    """As a file, as a folder on the way, and as the last component of several."""
    root = storage.root
    (root / "again").symlink_to("data")
    (root / "data" / "same").symlink_to("file")
    for name in ("data/file", "data/same", "again/file", "again/same"):
        assert storage.size_bytes(name) == 10
        assert storage.read(name, 2, 3) == b"234"
    (root / "out").symlink_to("../outside")
    (root / "data" / "out").symlink_to("../../outside/file")
    (root / "data" / "loop").symlink_to("loop")
    for name in (
        "out/file",
        "data/out",
        "again/out",
        "data/../../outside/file",
        "../outside/file",
        str(root.parent / "outside/file"),
    ):
        for call in (storage.path, storage.size_bytes, lambda name: storage.read(name, 0, 6)):
            with pytest.raises(UnsafePathError, match="leads outside"):
                call(name)
    with pytest.raises(UnsafePathError, match="cannot be resolved"):
        storage.read("data/loop", 0, 1)


def test_what_is_not_a_regular_file_has_no_size_and_is_not_read(storage: PosixStorage) -> None:
    os.mkfifo(storage.root / "data" / "pipe")
    for name in ("data", "data/pipe", "none", "data/none", "data/file/none"):
        assert storage.size_bytes(name) is None
        with pytest.raises(StorageError):
            storage.read(name, 0, 1)


@pytest.mark.parametrize("size_bytes", [11, 1 << 20])
def test_a_file_that_is_too_short_is_named(storage: PosixStorage, size_bytes: int) -> None:
    with pytest.raises(StorageError, match=rf"data/file: ends at byte 10, expected {size_bytes - 10} more bytes"):
        storage.read("data/file", 0, size_bytes)


def _stale(call: Call) -> None:
    if call.path in ("data/file", "lock"):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_cannot_be_examined_is_named(storage: PosixStorage) -> None:
    for call in (lambda: storage.read("data/file", 0, 1), lambda: storage.reader("data/file").__enter__()):
        with (
            watched(storage.root, _stale, ("fstat",)),
            pytest.raises(StorageError, match=r"data/file: cannot be examined \(Stale file handle\)"),
        ):
            call()


@pytest.mark.parametrize("kind", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_what_cannot_be_examined_is_not_absent(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """Also from Python 3.14 on, where pathlib takes every error for an absent file."""
    for name, function in (("is_file", os.path.isfile), ("is_dir", os.path.isdir), ("exists", os.path.exists)):
        monkeypatch.setattr(Path, name, lambda path, function=function: function(path))

    def refuse(call: Call) -> None:
        if call.path.startswith("data"):
            raise OSError(kind, os.strerror(kind))

    for look in (lambda: storage.size_bytes("data/file"), lambda: storage.names("data"), storage.folders):
        with watched(storage.root, refuse, ("stat", "lstat")), pytest.raises(StorageError, match="cannot be"):
            look()
    assert (storage.size_bytes("data/none"), storage.names("none"), storage.folders()) == (None, [], ["data"])


@pytest.mark.parametrize("name", ["fstat", "stat"])
def test_a_lock_whose_file_cannot_be_examined_is_held_until_its_release(storage: PosixStorage, name: str) -> None:
    with watched(storage.root, _stale, (name,)):
        release = storage.try_lock("lock")
    assert storage.try_lock("lock") is None
    assert release is not None
    release()
    again = storage.try_lock("lock")
    assert again is not None
    again()
    assert [path.name for path in storage.root.iterdir()] == ["data"]


def test_a_lock_that_the_file_system_refuses_leaves_no_descriptor(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = os.listdir("/proc/self/fd")
    held = storage.try_lock("lock")
    assert held is not None
    monkeypatch.setattr(fcntl, "flock", refuse)
    held()
    granted = storage.try_lock("lock")
    assert granted is not None
    granted()
    assert len(os.listdir("/proc/self/fd")) == len(before)


class _Far(PosixStorage):
    """Storage with latency, which knows how many files are read at a time."""

    latency_s = 0.004
    running = most = 0

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(self.latency_s)
        self.running -= 1
        return super().read(name, offset_bytes, size_bytes)


@pytest.mark.parametrize("latency_s", [0.0, 0.004])
def test_rows_arrive_in_order_and_several_at_a_time_from_far_storage(tmp_path: Path, latency_s: float) -> None:
    storage = _Far(tmp_path)
    storage.latency_s = latency_s
    files = []
    for folder in ("data", "rows"):
        (tmp_path / folder).mkdir()
    for rank in range(40):
        names = RankFiles(rank, 0)
        storage.path(names.data).write_bytes(bytes(rank))
        storage.path(names.rows).write_bytes(b"%d" % rank)
        files.append(FileRecord(names.data, rank, "", 0, ""))
    assert list(read_rows(storage, files, 0)) == [(record.path, b"%d" % rank) for rank, record in enumerate(files)]
    if latency_s:
        assert storage.most > 1
    storage.path(files[30].path).unlink()
    with pytest.raises(
        StorageError, match=r"rank 30 wrote 30 bytes, but on the host of the coordinator the file does not exist"
    ):
        list(read_rows(storage, files, 0))
