"""Reads of parts of fragments take and check the blocks that they need. Checkpoints of version 2 have no blocks."""

from __future__ import annotations

import random
import tarfile
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.rank_threads import alone
from tests.support.saves import WRITER
from tests.support.saving import save
from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.format import block_table
from unickpt.checkpoint.format.block_table import BlockTable
from unickpt.checkpoint.format.boxes import Box, stretches
from unickpt.checkpoint.format.checksums import (
    BLOCK_BYTES,
    RunningBlocks,
    block_checksums,
    block_count,
    block_range,
    combined,
    fragment_checksum,
)
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load import checked_read
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range

SHAPES = {"flat": (300_000,), "wide": (40, 40_000), "tall": (20_000, 16), "deep": (8, 100, 300), "small": (100,)}


def values(shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).view(shape)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    shards = []
    for name, shape in SHAPES.items():
        info = TensorInfo(name, "master", "F32", shape, "parameter")
        shards += shards_of_flat_range(info, 0, info.numel, values(shape).view(-1))
    save(lambda _: Contribution(shards, 1, WRITER), save_dir=str(tmp_path), tag="a", save_latest=False, exchange=alone())
    return Checkpoint.open(tmp_path / "a")


def part_of(checkpoint: Checkpoint, name: str, box: Box, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, int]:
    """Return a part of a tensor in the given dtype, and the bytes that were read for it without the table."""
    out = torch.zeros(box.numel, dtype=dtype)
    stats = checkpoint.read([Request(checkpoint.ids[name, "master"], box, out)])
    assert stats.bytes_needed == 4 * box.numel
    return out.view(box.shape), stats.bytes_read


def blocks_of(name: str, box: Box) -> set[int]:
    """Return the blocks that hold elements of a box, by looking at each element."""
    count = block_count(4 * torch.Size(SHAPES[name]).numel(), BLOCK_BYTES)
    places = np.arange(torch.Size(SHAPES[name]).numel()).reshape(SHAPES[name])[box.slices()]
    return set(np.minimum(4 * places // BLOCK_BYTES, count - 1).reshape(-1).tolist())


BOXES = [
    ("flat", Box((0,), (1,))), ("flat", Box((299_999,), (1,))), ("flat", Box((16_383,), (2,))), ("flat", Box((5,), (200_000,))),
    ("wide", Box((0, 0), (40, 20_000))), ("wide", Box((3, 39_999), (37, 1))), ("tall", Box((0, 3), (20_000, 1))),
    ("tall", Box((7, 0), (9_000, 16))), ("deep", Box((2, 30, 0), (3, 20, 300))), ("deep", Box((0, 99, 299), (8, 1, 1))),
    ("small", Box((3,), (5,))),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["extension", "python"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_blocks_of_a_part_are_read_and_no_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: torch.dtype
) -> None:
    if not fast:
        monkeypatch.setattr(checked_read, "available", lambda: False)
    chosen = random.Random(1)
    boxes = list(BOXES)
    for _ in range(60):
        name = chosen.choice(list(SHAPES))
        starts = [chosen.randrange(extent) for extent in SHAPES[name]]
        extents = [chosen.randrange(1, extent - start + 1) for extent, start in zip(SHAPES[name], starts, strict=True)]
        boxes.append((name, Box(tuple(starts), tuple(extents))))
    for name, box in boxes:
        found, read = part_of(checkpoint, name, box, dtype)
        assert torch.equal(found, values(SHAPES[name])[box.slices()].to(dtype))
        size = 4 * torch.Size(SHAPES[name]).numel()
        count = block_count(size, BLOCK_BYTES)
        spans = [block_range(at, at + 1, size, BLOCK_BYTES) for at in blocks_of(name, box)]
        assert read == sum(end - begin for begin, end in spans), (name, box, count)


def file_of(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.storage.where("data/rank00000.safetensors"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damage_is_found_in_the_blocks_that_are_read_and_named_by_its_place(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    row = checkpoint.index.rows_of(checkpoint.ids["flat", "master"])[0]
    offset = int(checkpoint.index.offset_bytes[row])
    flip(file_of(checkpoint), offset + 5 * BLOCK_BYTES + 7)
    again = Checkpoint.open(file_of(checkpoint).parent.parent)
    part_of(again, "flat", Box((0,), (5 * BLOCK_BYTES // 4,)), dtype)
    part_of(again, "flat", Box((6 * BLOCK_BYTES // 4,), (10,)), dtype)
    place = rf"damaged at bytes {offset + 5 * BLOCK_BYTES:,} to {offset + 6 * BLOCK_BYTES:,}"
    with pytest.raises(CorruptCheckpointError, match=place):
        part_of(again, "flat", Box((4 * BLOCK_BYTES // 4,), (10 * BLOCK_BYTES // 4,)), dtype)
    with pytest.raises(CorruptCheckpointError, match="flat"):
        again.read_tensor("flat", "master")
    assert [problem for problem in verify_checkpoint(again.storage.where()).problems if "flat (master)" in problem]


def test_a_damaged_table_is_not_believed(checkpoint: Checkpoint) -> None:
    """The whole fragment is read in its place, and ``verify`` tells that the file is not as it was written."""
    box = Box((100_000,), (50_000,))
    before = part_of(checkpoint, "flat", box)
    record = checkpoint.manifest.file("data/rank00000.safetensors")
    for word in range(record.table_bytes // 8):
        path = file_of(checkpoint)
        good = path.read_bytes()
        flip(path, record.size_bytes - record.table_bytes + 8 * word + 2)
        again = Checkpoint.open(path.parent.parent)
        found, read = part_of(again, "flat", box)
        assert torch.equal(found, before[0])
        assert read in (before[1], 4 * 300_000)
        problems = verify_checkpoint(path.parent.parent).problems
        assert len(problems) == 1
        assert "differs from the manifest" in problems[0]
        path.write_bytes(good)


def test_tables_of_strangers_do_no_harm() -> None:
    checksums = block_checksums(memoryview(bytes(range(256)) * 1024))
    good = block_table.to_bytes([(4096, checksums)])
    assert BlockTable(good).checksums(4096, 4, combined(checksums)) == checksums
    assert BlockTable(good).checksums(4096, 4, combined(checksums) ^ 1) is None
    assert BlockTable(good).checksums(0, 4, combined(checksums)) is None
    assert BlockTable(good).checksums(4096, 5, combined(checksums)) is None
    chosen = random.Random(2)
    for _ in range(2000):
        words = array("Q", [chosen.choice([0, 1, 2, 3, 4096, 1 << 63, (1 << 64) - 1]) for _ in range(chosen.randrange(9))])
        data = words.tobytes() + bytes(chosen.randrange(8))
        assert BlockTable(data).checksums(4096, chosen.choice([2, 3, 1 << 40]), 5) is None


def test_the_size_of_a_table_is_known_before_its_checksums() -> None:
    chosen = random.Random(3)
    for _ in range(200):
        sizes = [
            chosen.choice([1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES, 900_001]) for _ in range(chosen.randrange(9))
        ]
        several = [
            (0, array("Q", bytes(8 * count))) for count in map(lambda s: block_count(s, BLOCK_BYTES), sizes) if count > 1
        ]
        assert block_table.table_bytes(sizes) == (len(block_table.to_bytes(several)) if several else 0)
        assert block_table.table_bytes(sizes) <= block_table.room_bytes(sum(sizes))


@pytest.mark.parametrize("size", [1, 240, 241, 65_536, 131_071, 131_072, 131_073, 200_000, 1_000_000])
def test_checksums_are_the_same_at_once_and_piece_by_piece(size: int) -> None:
    data = random.Random(size).randbytes(size)
    whole = block_checksums(memoryview(data))
    assert len(whole) == block_count(size, BLOCK_BYTES)
    spans = [block_range(at, at + 1, size, BLOCK_BYTES) for at in range(len(whole))]
    assert [fragment_checksum(data[begin:end], 0) for begin, end in spans] == list(whole)
    assert spans[0][0] == 0
    assert spans[-1][1] == size
    running, at, chosen = RunningBlocks(size, BLOCK_BYTES), 0, random.Random(4)
    while at < size:
        step = chosen.choice([1, 100, 65_536, 300_000])
        running.update(data[at : at + step])
        at += step
    assert running.value() == whole


def test_stretches_have_the_elements_of_a_box() -> None:
    chosen = random.Random(5)
    for _ in range(500):
        shape = tuple(chosen.randrange(1, 7) for _ in range(chosen.randrange(5)))
        starts = [chosen.randrange(extent) for extent in shape]
        box = Box(tuple(starts), tuple(chosen.randrange(1, e - s + 1) for e, s in zip(shape, starts, strict=True)))
        places = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[box.slices()].reshape(-1)
        near = chosen.choice([0, 0, 1, 5, 1000])
        begins, ends = stretches(box, shape, near)
        covered = np.concatenate([np.arange(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)])
        assert set(places.tolist()) <= set(covered.tolist())
        assert len(covered) == len(set(covered.tolist()))
        if not near:
            assert covered.tolist() == places.tolist()
        gaps = begins[1:] - ends[:-1]
        assert (gaps > near).all()


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """A checkpoint that the release before blocks wrote."""
    with tarfile.open(Path(__file__).with_name("version2.tar.gz")) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    return tmp_path / "a"


def test_a_checkpoint_of_version_2_is_read_and_checked(version_2: Path) -> None:
    checkpoint = Checkpoint.open(version_2)
    assert (checkpoint.manifest.version, checkpoint.index.block_bytes) == (2, 0)
    assert verify_checkpoint(version_2).problems == ()
    expected = (torch.arange(80_000) % 1000 * 0.5).view(400, 200)
    assert torch.equal(checkpoint.read_tensor("large", "master"), expected)
    for dtype in (torch.float32, torch.float64):
        out = torch.zeros(10 * 200, dtype=dtype)
        stats = checkpoint.read([Request(checkpoint.ids["large", "master"], Box((5, 0), (10, 200)), out)])
        assert torch.equal(out.view(10, 200), expected[5:15].to(dtype))
        assert stats.bytes_read == 320_000  # a whole fragment has one checksum
    flip(version_2 / "data/rank00000.safetensors", 300_000)
    with pytest.raises(CorruptCheckpointError, match="large"):
        part_of(Checkpoint.open(version_2), "large", Box((5, 0), (10, 200)))
