"""Past the page cache: whatever the sizes and addresses, the file holds the bytes in their order."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unickpt.base.errors import StorageError
from unickpt.checkpoint.save.data_file import MemoryRun, extend
from unickpt.checkpoint.storage import direct_io
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES
from unickpt.checkpoint.storage.posix import PosixStorage

SIZES = st.lists(
    st.tuples(st.one_of(st.integers(0, 70), st.integers(4000, 13_000), st.just(BLOCK_BYTES)), st.integers(0, 5000)), max_size=12
)


@pytest.fixture(params=[direct_io._BOUNCE_BYTES, 2 * BLOCK_BYTES], ids=["one buffer", "buffers in turn"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that is not aligned fits into one buffer, or is written by a thread while the next buffer is filled."""
    monkeypatch.setattr(direct_io, "_BOUNCE_BYTES", request.param)


@pytest.mark.usefixtures("buffers")
@given(sizes=SIZES, touching=st.booleans(), direct=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_the_file_is_the_concatenation_of_its_parts(
    tmp_path: Path, sizes: list[tuple[int, int]], touching: bool, direct: bool
) -> None:
    region = mmap.mmap(-1, 1 << 20)
    memory = memoryview(region)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    parts, at = [], 0
    for size, gap in sizes:
        at += 0 if touching else gap
        parts.append(memory[at : at + size])
        at += size
    runs: list[MemoryRun] = []
    for part in parts:
        extend(runs, part)
    if touching:
        assert len(runs) <= 1
    storage = PosixStorage(tmp_path)
    with storage.create("x", direct=direct) as sink:
        sink.write([run.memory() for run in runs])
        sink.write([memory[:0]])
    assert (tmp_path / "x").read_bytes() == b"".join(bytes(part) for part in parts)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize("call", range(3))
def test_a_file_system_that_refuses_later_gets_the_rest_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    monkeypatch.setattr(direct_io, "_CALL_BYTES", BLOCK_BYTES)
    real, calls = os.pwrite, [0]

    def refusing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == call + 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", refusing)
    data = torch.arange(20_000, dtype=torch.uint8)
    with PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([memoryview(data.numpy())[:9_001], memoryview(data.numpy())[9_001:]])
    assert (tmp_path / "x").read_bytes() == data.numpy().tobytes()


@pytest.mark.usefixtures("buffers")
def test_short_writes_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(len(data) // 2, 1)], at))
    data = torch.arange(50_000, dtype=torch.uint8)
    with PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([memoryview(data.numpy())])
    assert (tmp_path / "x").read_bytes() == data.numpy().tobytes()


@pytest.mark.usefixtures("buffers")
def test_a_full_disk_is_an_error_and_not_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"), PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([memoryview(bytes(10_000))])


def _unaligned(size: int) -> memoryview:
    """Return bytes at an odd address, which are copied into a buffer."""
    region = mmap.mmap(-1, size + BLOCK_BYTES)
    region[1 : size + 1] = (bytes(range(251)) * (size // 251 + 1))[:size]
    return memoryview(region)[1 : size + 1]


def test_a_thread_writes_one_buffer_while_the_other_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_BOUNCE_BYTES", 2 * BLOCK_BYTES)
    real, threads = os.pwrite, set()

    def noting(*args: Any) -> int:
        threads.add(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", noting)
    data = _unaligned(40 * BLOCK_BYTES + 17)
    with PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([data])
    assert (tmp_path / "x").read_bytes() == bytes(data)
    assert "unickpt-write" in threads
    assert "unickpt-write" not in {each.name for each in threading.enumerate()}


def test_where_no_thread_can_be_started_the_caller_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_BOUNCE_BYTES", 2 * BLOCK_BYTES)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fails)
    data = _unaligned(9 * BLOCK_BYTES + 17)
    with PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([data])
    assert (tmp_path / "x").read_bytes() == bytes(data)


def test_an_error_of_the_thread_reaches_the_caller_once_and_nothing_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_BOUNCE_BYTES", 2 * BLOCK_BYTES)
    real, calls = os.pwrite, [0]

    def full(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"), PosixStorage(tmp_path).create("x", direct=True) as sink:
        sink.write([_unaligned(100 * BLOCK_BYTES)])
    assert calls[0] == 3
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("cached", [True, False])
def test_reads_of_any_place_and_length(tmp_path: Path, cached: bool) -> None:
    data = torch.randint(0, 256, (3_000_003,), dtype=torch.uint8).numpy()
    storage = PosixStorage(tmp_path)
    with storage.create("x", direct=True) as sink:
        sink.write([memoryview(data)])
    if cached:
        assert (tmp_path / "x").read_bytes() == data.tobytes()
    for begin, size in ((0, 3_000_003), (1, 400_000), (4096, 262_144), (4095, 262_146), (2_700_000, 300_003), (5, 10)):
        buffer = bytearray(size)
        with storage.reader("x") as reader:
            reader.read_into([memoryview(buffer)[: size // 3], memoryview(buffer)[size // 3 :]], begin)
        assert buffer == data[begin : begin + size].tobytes()
    with storage.reader("x") as reader, pytest.raises(StorageError, match=r"expected .* more bytes"):
        reader.read_into([memoryview(bytearray(500_000))], 2_600_000)
    with storage.reader("x") as reader, pytest.raises(StorageError, match=r"expected .* more bytes"):
        reader.read_into([memoryview(bytearray(2_000_000))], 2_600_000)


@pytest.mark.parametrize("read_mib", [0, 1, 3, 4])
def test_a_range_is_cached_if_most_of_its_pages_are(tmp_path: Path, read_mib: int) -> None:
    storage = PosixStorage(tmp_path)
    with storage.create("x", direct=True) as sink:
        sink.write([memoryview(bytes(4 << 20))])
    with (tmp_path / "x").open("rb", buffering=0) as file:
        if direct_io.mostly_cached(file.fileno(), 0, 4 << 20):
            pytest.skip("this file system has no direct I/O")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        assert len(file.read(read_mib << 20)) == read_mib << 20
        assert direct_io.mostly_cached(file.fileno(), 0, 4 << 20) == (read_mib > 2)
        assert direct_io.mostly_cached(file.fileno(), 0, 4 << 20, True, 64) == (read_mib == 4)
        assert direct_io.mostly_cached(file.fileno(), 5, 100) == (read_mib > 0)
        assert direct_io.mostly_cached(file.fileno(), (4 << 20) - 1, 1) == (read_mib == 4)


def test_what_the_system_does_not_tell_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))
    with (tmp_path / "x").open("rb") as file:
        assert direct_io.mostly_cached(file.fileno(), 0, 100_000, False)
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path / "x").st_uid + 1)
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        assert not direct_io.mostly_cached(file.fileno(), 0, 100_000, False)
        assert direct_io.mostly_cached(file.fileno(), 0, 100_000)


def test_pages_that_nobody_has_touched_are_not_in_memory() -> None:
    pages = 8
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as region:
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        assert direct_io._resident(address, pages) == 0
        for page in (0, 3, 7):
            region[page * mmap.PAGESIZE] = 1
        assert direct_io._resident(address, pages) == 3
        gc.collect()  # the view of the address, without which the mapping could not be closed
