"""Reads in blocks that fit into the cache of a core: by several threads from the page cache, by one from a disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.rank_threads import alone
from tests.support.saves import WRITER
from tests.support.saving import save
from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load import checked_read, fragments
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.file_blocks import cores_of, in_turns, read_blocks
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.reader import execute
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range
from unickpt.checkpoint.storage import posix
from unickpt.checkpoint.storage.base import Reader
from unickpt.checkpoint.storage.posix import PosixStorage

SIZES = (1000, 300_000, 1, 1_500_000, 70_000, 3)
INFOS = [TensorInfo(f"t{at}", "weight", "F32", (size,), "parameter") for at, size in enumerate(SIZES)]


@given(sizes=st.lists(st.integers(0, 3000), max_size=20), block=st.sampled_from([1, 7, 256, 4096]), begin=st.integers(0, 50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_blocks_fill_all_ranges_in_order(tmp_path: Path, sizes: list[int], block: int, begin: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 70_000, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    views = [memoryview(bytearray(size)) for size in sizes]
    parts: list[list[int]] = [[] for _ in sizes]
    ended: list[int] = []
    at = begin
    with PosixStorage(tmp_path).reader("x") as reader:
        for found in read_blocks(reader, begin, enumerate(views), block):
            assert sum(len(part) for _, part, _ in found) <= block
            for label, part, last in found:
                assert part == data[at : at + len(part)]  # it has been read already
                at += len(part)
                parts[label].append(len(part))
                ended += [label] if last else []
    assert ended == [label for label, size in enumerate(sizes) if size]
    assert [sum(each) for each in parts] == sizes
    assert b"".join(views) == data[begin : begin + sum(sizes)]


def saved(folder: Path) -> Checkpoint:
    shards = [shard for info in INFOS for shard in shards_of_flat_range(info, 0, info.numel, torch.arange(info.numel) * 0.5)]
    save(lambda _: Contribution(shards, 1, WRITER), save_dir=str(folder), tag="a", save_latest=True, exchange=alone())
    for path in (folder / "a" / "data").iterdir():
        path.read_bytes()  # into the page cache
    return Checkpoint.open(folder / "a")


def requests_of(checkpoint: Checkpoint) -> list[Request]:
    return [Request(checkpoint.ids[info.key], Box.whole(info.shape), torch.zeros(info.numel)) for info in INFOS]


class Watch:
    """Records the reads of all files: file position, size, name of the thread; and how many threads read at a time.

    Python reads here: a test cannot watch the system calls of the extension. ``test_checked_read.py`` tests the extension.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[int, int, str]] = []
        self.most, self._active, self._lock = 0, 0, threading.Lock()
        self._read_into = posix._DescriptorReader.read_into
        watch = self
        monkeypatch.setattr(checked_read, "available", lambda: False)

        def read_into(reader: posix._DescriptorReader, parts: Sequence[memoryview], offset_bytes: int) -> None:
            watch.read(reader, parts, offset_bytes)

        monkeypatch.setattr(posix._DescriptorReader, "read_into", read_into)

    def read(self, reader: posix._DescriptorReader, parts: Sequence[memoryview], offset_bytes: int) -> None:
        with self._lock:
            self._active += 1
            self.most = max(self.most, self._active)
            self.reads.append((offset_bytes, sum(map(len, parts)), threading.current_thread().name))
        self._read_into(reader, parts, offset_bytes)
        time.sleep(0.005)  # long enough for another thread to arrive
        with self._lock:
            self._active -= 1


def executed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, *, ranks: int) -> Watch:
    monkeypatch.setattr(fragments, "_BATCH_BYTES", 100_000)
    requests = requests_of(checkpoint)
    planned = checkpoint.plan(requests)
    watch = Watch(monkeypatch)
    execute(checkpoint.storage, checkpoint.index, planned.plan, requests, ranks=ranks)
    assert all(torch.equal(request.out, torch.arange(request.box.numel) * 0.5) for request in requests)
    assert sum(size for _, size, _ in watch.reads) == 4 * sum(SIZES)
    return watch


def test_cached_files_are_read_in_small_blocks_by_as_many_threads_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = executed(saved(tmp_path), monkeypatch, ranks=10**6)
    assert max(size for _, size, _ in watch.reads) == 256 << 10
    assert watch.most == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert executed(saved(tmp_path), monkeypatch, ranks=1).most > 1


def test_a_disk_is_read_front_to_back_by_one_thread_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tmp_path)
    monkeypatch.setattr(posix._DescriptorReader, "is_cached", lambda *_: False)
    watch = executed(checkpoint, monkeypatch, ranks=1)
    assert [offset for offset, _, _ in watch.reads] == sorted(offset for offset, _, _ in watch.reads)
    assert len({thread for _, _, thread in watch.reads}) == 1
    assert len(watch.reads) > len(SIZES)


def test_only_a_file_that_may_be_on_a_disk_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))

    class Remote:
        path, block_bytes = "x", 77

        def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None: ...

    class HalfCached(Remote):
        def is_cached(self, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0, /) -> bool:
            assert unknown
            assert (size_bytes, every) in ((10, 0), (100, 20))
            return offset_bytes >= 30

    class Cached(Remote):
        def is_cached(self, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0, /) -> bool:
            assert (offset_bytes, size_bytes, unknown, every) == (0, 100, True, 20), "one question for many ranges"
            return True

    cores = cores_of(1)

    def turns(reader: Reader, count: int) -> list[tuple[list[int], bool]]:
        found = in_turns(reader, [(10 * at, 10) for at in range(count)], lambda span: span, cores)
        return [([offset for offset, _ in ranges], turn is cores) for ranges, turn in found]

    assert turns(Remote(), 5) == [([at], False) for at in range(0, 50, 10)]
    assert turns(HalfCached(), 5) == [([30], True), ([40], True), ([0, 10, 20], False)]
    assert turns(HalfCached(), 10) == [*(([at], True) for at in range(30, 100, 10)), ([0, 10, 20], False)]
    assert turns(Cached(), 10) == [([at], True) for at in range(0, 100, 10)]


@pytest.mark.parametrize("at_byte", [0, 3_999, 4_000, 700_000, 1_204_004, 6_000_000, 7_484_015])
def test_damage_in_any_block_is_found(tmp_path: Path, at_byte: int) -> None:
    checkpoint = saved(tmp_path)
    (name,) = checkpoint.index.files
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    assert 4 * sum(SIZES) == 7_484_016
    begin = int(checkpoint.index.offset_bytes.min())
    data[begin + at_byte] ^= 1
    path.write_bytes(data)
    requests = requests_of(checkpoint)
    with pytest.raises(CorruptCheckpointError, match="checksum of t"):
        checkpoint.read(requests)
