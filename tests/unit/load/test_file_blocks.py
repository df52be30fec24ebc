"""Reads from the page cache in blocks that fit into the cache of a core."""

from __future__ import annotations

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
from unickpt.errors import CorruptCheckpointError
from unickpt.format.boxes import Box
from unickpt.format.index import TensorInfo
from unickpt.load import file_blocks
from unickpt.load import reader as reader_module
from unickpt.load.checkpoint import Checkpoint
from unickpt.load.file_blocks import CACHED_BLOCK_BYTES, block_bytes_of, read_blocks
from unickpt.load.reader import Request, execute
from unickpt.save.saver import save
from unickpt.save.shards import Contribution, shards_of_flat_range
from unickpt.storage import posix
from unickpt.storage.posix import PosixStorage

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
    save(lambda _: Contribution(shards, 1, WRITER), save_dir=str(folder), tag="a", save_latest=True, meet=alone())
    for path in (folder / "a" / "data").iterdir():
        path.read_bytes()  # into the page cache
    return Checkpoint.open(folder / "a")


def requests_of(checkpoint: Checkpoint) -> list[Request]:
    return [Request(checkpoint.ids[info.key], Box.whole(info.shape), torch.zeros(info.numel)) for info in INFOS]


def test_cached_files_are_read_in_small_blocks_by_as_many_threads_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_BATCH_BYTES", 100_000)
    checkpoint = saved(tmp_path)
    requests = requests_of(checkpoint)
    planned = checkpoint.plan(requests)
    read_into = posix._DescriptorReader.read_into
    sizes: list[int] = []
    active, most, lock = 0, 0, threading.Lock()

    def watched(self: posix._DescriptorReader, parts: Sequence[memoryview], offset_bytes: int) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
            sizes.append(sum(map(len, parts)))
        read_into(self, parts, offset_bytes)
        time.sleep(0.005)  # long enough for another thread to arrive
        with lock:
            active -= 1

    monkeypatch.setattr(posix._DescriptorReader, "read_into", watched)
    execute(checkpoint.storage, checkpoint.index, planned.plan, requests, ranks=10**6)
    assert all(torch.equal(request.out, torch.arange(request.box.numel) * 0.5) for request in requests)
    assert sum(sizes) == 4 * sum(SIZES)
    assert max(sizes) == CACHED_BLOCK_BYTES
    assert most == 1


def test_files_of_other_readers_have_blocks_of_their_own_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    with PosixStorage(tmp_path).reader("x") as reader:
        assert block_bytes_of(reader, 0, 100) == file_blocks.CACHED_BLOCK_BYTES

        class Remote:
            path, block_bytes, read_into = "x", 77, reader.read_into

        assert block_bytes_of(Remote(), 0, 100) == 77


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
