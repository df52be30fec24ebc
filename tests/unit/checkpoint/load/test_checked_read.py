"""Reads with checksums and casts on the way: the extension and Python do the same, and a load uses them."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_threads import alone
from tests.support.saves import WRITER
from tests.support.saving import save
from unickpt.base.errors import CorruptCheckpointError, StorageError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.checksums import block_checksums
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load import checked_read
from unickpt.checkpoint.load import reader as reader_module
from unickpt.checkpoint.load.checked_read import (
    FileRange,
    NeededPart,
    NeededParts,
    available,
    bytes_of,
    read_checked,
    read_pieces,
)
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request, batches_of, by_file
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range
from unickpt.checkpoint.storage.base import DescriptorReader
from unickpt.checkpoint.storage.posix import PosixStorage

BOTH = pytest.mark.parametrize("extension", [True, False], ids=["extension", "python"])
SECONDS = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_the_extension_is_installed_where_the_processor_has_its_instructions() -> None:
    """The environment of the tests has a compiler."""
    assert available() is ("avx2" in Path("/proc/cpuinfo").read_text().split())


def parts_of(sizes: list[int], chosen: random.Random) -> list[FileRange]:
    """Return a part for each size in bytes: floats with a second place, bytes otherwise."""
    found = []
    for size in sizes:
        if size % 4:
            found.append(
                FileRange(torch.zeros(size, dtype=torch.uint8), chosen.choice([None, torch.zeros(size, dtype=torch.uint8)]))
            )
        else:
            dtype = chosen.choice(SECONDS)
            found.append(FileRange(torch.zeros(size // 4), None if dtype is None else torch.zeros(size // 4, dtype=dtype)))
    return found


EDGES = [1, 4, 16, 17, 128, 129, 240, 241, 256, 1023, 1024, 1025, 1028, 1088, 2047, 2048, 2049, 65_536, 300_004]


@BOTH
@pytest.mark.parametrize("step", [7, 4096, 256 << 10])
@pytest.mark.parametrize("block", [0, 256, 4096])
def test_parts_have_their_bytes_their_checksums_and_their_casts(tmp_path: Path, extension: bool, step: int, block: int) -> None:
    chosen = random.Random(step)
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    (tmp_path / "x").write_bytes(bytes(bytes_of(numbers)))
    data = (tmp_path / "x").read_bytes()
    for sizes in (EDGES, [size + 4 for size in EDGES], [chosen.randrange(1, 5000) for _ in range(150)]):
        begin = chosen.randrange(500)
        parts = parts_of(sizes, chosen)
        with PosixStorage(tmp_path).reader("x") as reader:
            assert isinstance(reader, DescriptorReader)
            reader.block_bytes = step  # type: ignore[misc]
            found = read_checked(reader, begin, parts, block, extension=extension)
            assert not any(map(any, read_checked(reader, begin, parts, block, checks=False, extension=extension)))
        at = begin
        for part, checksums in zip(parts, found, strict=True):
            expected = data[at : at + part.target.nbytes]
            at += len(expected)
            assert bytes_of(part.target) == expected
            assert checksums == block_checksums(memoryview(expected), block)
            if part.second is not None:
                assert same(part.second, part.target.to(part.second.dtype))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tensors are equal; a NaN equals any NaN, of which a cast makes one of several."""
    return (
        torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        if found.is_floating_point()
        else torch.equal(found, expected)
    )


SPECIAL = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, 1.00390625, 1.01171875, 65536.0]


@BOTH
def test_a_cast_rounds_as_torch_does(tmp_path: Path, extension: bool) -> None:
    bits = torch.arange(0, 1 << 32, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    numbers = torch.cat([torch.tensor(SPECIAL), bits])
    (tmp_path / "x").write_bytes(bytes(bytes_of(numbers)))
    part = FileRange(torch.zeros_like(numbers), torch.zeros(len(numbers), dtype=torch.bfloat16))
    assert part.second is not None
    with PosixStorage(tmp_path).reader("x") as reader:
        read_checked(reader, 0, [part], 0, extension=extension)
    expected = numbers.to(torch.bfloat16)
    assert torch.equal(part.second.isnan(), expected.isnan())
    assert torch.equal(part.second.view(torch.int16)[~expected.isnan()], expected.view(torch.int16)[~expected.isnan()])


@BOTH
def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, extension: bool) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    parts = [FileRange(torch.zeros(100)), FileRange(torch.zeros(200))]
    ends = pytest.raises(StorageError, match=r"x: ends at byte 1000, expected 250 more bytes")
    with PosixStorage(tmp_path).reader("x") as reader, ends:
        read_checked(reader, 50, parts, 0, extension=extension)


SIZES = [241, 256, 1023, 1024, 1025, 2048, 4096, 4097, 65_536, 65_537, 300_004]


@pytest.mark.skipif(not available(), reason="the extension is not installed")
@pytest.mark.parametrize("step", [7, 4096, 5000, 256 << 10])
@pytest.mark.parametrize("block", [0, 256, 4096, 16384])
def test_pieces_have_their_elements_and_fragments_their_checksums(tmp_path: Path, step: int, block: int) -> None:
    chosen = random.Random(step)
    numbers = torch.randn(1 << 19, generator=torch.Generator().manual_seed(1))
    (tmp_path / "x").write_bytes(bytes(bytes_of(numbers)))
    data = (tmp_path / "x").read_bytes()
    fragments, expected = [], []
    for size in [*SIZES, *(size // 4 * 4 + 4 for size in SIZES), *(4 * chosen.randrange(61, 20_000) for _ in range(60))]:
        offset = 4 * chosen.randrange((len(data) - size) // 4)
        item = 1 if size % 4 else 4
        count, pieces = size // item, []
        for _ in range(chosen.randrange(4)):
            lo = chosen.randrange(count)
            hi = chosen.randrange(lo, count + 1)
            dtype = torch.uint8 if item == 1 else chosen.choice([torch.float32, torch.bfloat16])
            pieces.append(NeededPart(lo * item, (hi - lo) * item, torch.zeros(hi - lo, dtype=dtype)))
            stored = torch.frombuffer(
                bytearray(data[offset : offset + size]), dtype=torch.uint8 if item == 1 else torch.float32
            )
            expected.append(stored[lo:hi].to(dtype))
        fragments.append(NeededParts(offset, size, torch.uint8 if item == 1 else torch.float32, pieces))
    assert all(fragment.are_castable() for fragment in fragments)
    with PosixStorage(tmp_path).reader("x") as reader:
        reader.block_bytes = step  # type: ignore[misc]
        found = read_pieces(reader, fragments, block)
        assert not any(map(any, read_pieces(reader, fragments, block, checks=False) or ()))
    parts = [memoryview(data[each.offset_bytes : each.offset_bytes + each.size_bytes]) for each in fragments]
    assert found == [block_checksums(part, block) for part in parts]
    targets = [piece.target for fragment in fragments for piece in fragment.pieces]
    assert all(same(target, value) for target, value in zip(targets, expected, strict=True))


def test_pieces_that_no_copy_can_fill_are_told() -> None:
    def castable(size: int, dtype: torch.dtype, target: torch.Tensor) -> bool:
        return NeededParts(0, size, dtype, [NeededPart(0, 4 * target.numel(), target)]).are_castable()

    assert castable(400, torch.float32, torch.zeros(100))
    assert castable(400, torch.float32, torch.zeros(100, dtype=torch.bfloat16))
    assert not castable(400, torch.float32, torch.zeros(100, dtype=torch.float16))
    assert not castable(400, torch.float32, torch.zeros(200)[::2])
    assert not castable(240, torch.float32, torch.zeros(60))


@pytest.mark.skipif(not available(), reason="the extension is not installed")
def test_a_fragment_beyond_the_end_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    fragments = [
        NeededParts(0, 400, torch.float32, []),
        NeededParts(800, 400, torch.float32, [NeededPart(0, 400, torch.zeros(100))]),
    ]
    ends = pytest.raises(StorageError, match=r"x: ends at byte 1000, expected 200 more bytes")
    with PosixStorage(tmp_path).reader("x") as reader, ends:
        read_pieces(reader, fragments, 0)


@BOTH
def test_an_error_of_the_system_names_the_file(tmp_path: Path, extension: bool) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    with PosixStorage(tmp_path).reader("x") as reader:
        assert isinstance(reader, DescriptorReader)
        reader.descriptor = os.open(tmp_path, os.O_RDONLY)  # type: ignore[misc]
        with pytest.raises(StorageError, match=r"x: cannot be read .*directory"):
            read_checked(reader, 0, [FileRange(torch.zeros(100))], 0, extension=extension)
        os.close(reader.descriptor)


@pytest.mark.skipif(not available(), reason="the extension is not installed")
def test_a_table_that_makes_no_sense_is_refused() -> None:
    def refused(*numbers: int, step: int = 4096, block: int = 0) -> None:
        with pytest.raises(ValueError, match=r"integers|range"):
            checked_read._checked_read.read_parts(0, 0, array("Q", numbers).tobytes(), step, True, block)

    refused(1, 2, 3)
    refused(0, 0, 0, 0)
    refused(0, 1 << 63, 0, 0)
    refused(0, 4, 0, 3)
    refused(0, 6, 0, 2)
    refused(0, 4, 0, 0, step=0)

    def refused_pieces(fragments: list[int], pieces: list[int], step: int = 4096, block: int = 0) -> None:
        tables = (array("Q", numbers).tobytes() for numbers in (fragments, pieces))
        with pytest.raises(ValueError, match=r"integers|range"):
            checked_read._checked_read.read_pieces(0, *tables, step, True, block)

    refused_pieces([0, 400], [])
    refused_pieces([0, 400, 1], [0, 4, 0])
    refused_pieces([0, 400, 1], [])
    refused_pieces([0, 240, 0], [])
    refused_pieces([0, 1 << 63, 0], [])
    refused_pieces([0, 400, 1], [0, 404, 0, 1])
    refused_pieces([0, 400, 1], [404, 0, 0, 1])
    refused_pieces([0, 400, 1], [0, 4, 0, 0])
    refused_pieces([0, 400, 1], [2, 4, 0, 2])
    refused_pieces([0, 400, 1 << 62], [0, 4, 0, 1])
    refused_pieces([0, 400, 0], [], 1000)
    refused_pieces([0, 400, 0], [], 4100)


INFOS = [TensorInfo(f"t{at}", "master", "F32", (size,), "parameter") for at, size in enumerate((70_000, 3, 200_000))]


def saved(folder: Path) -> Checkpoint:
    shards = [shard for info in INFOS for shard in shards_of_flat_range(info, 0, info.numel, torch.arange(info.numel) * 0.5)]
    save(lambda _: Contribution(shards, 1, WRITER), save_dir=str(folder), tag="a", save_latest=True, exchange=alone())
    return Checkpoint.open(folder / "a")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first", [0, 1], ids=["exact-first", "cast-first"])
def test_two_outputs_of_one_fragment_are_filled_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: bool, dtype: torch.dtype, first: int
) -> None:
    if not extension:
        monkeypatch.setattr(checked_read, "available", lambda: False)
    monkeypatch.setattr(reader_module, "_read_through_scratch", None)
    checkpoint = saved(tmp_path)
    exact = [Request(checkpoint.ids[info.key], Box.whole(info.shape), torch.zeros(info.shape)) for info in INFOS]
    cast = [
        Request(request.tensor_id, request.box, torch.zeros(request.box.numel, dtype=dtype), derived=True) for request in exact
    ]
    stats = checkpoint.read([*exact, *cast] if first == 0 else [*cast, *exact])
    for info, one, other in zip(INFOS, exact, cast, strict=True):
        expected = torch.arange(info.numel) * 0.5
        assert torch.equal(one.out, expected)
        assert torch.equal(other.out, expected.to(dtype))
    assert stats.bytes_read == stats.bytes_needed == 4 * sum(info.numel for info in INFOS)


@BOTH
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_view_with_its_sign_changed_receives_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: bool, part: bool
) -> None:
    if not extension:
        monkeypatch.setattr(checked_read, "available", lambda: False)
    checkpoint = saved(tmp_path)
    info = INFOS[0]
    box = Box((10,), (500,)) if part else Box.whole(info.shape)
    out = torch._neg_view(torch.zeros(box.numel))
    checkpoint.read([Request(checkpoint.ids[info.key], box, out)])
    assert torch.equal(out, (torch.arange(info.numel) * 0.5)[box.slices()])


def test_fragments_with_pieces_are_one_batch_only_where_the_extension_reads_them(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    requests = [
        Request(checkpoint.ids[i.key], Box((1,), (i.numel - 1,)), torch.zeros(i.numel - 1)) for i in INFOS if i.numel > 99
    ]
    plan = checkpoint.plan(requests).plan
    for with_pieces, count in ((True, 1), (False, len(requests))):
        ((_, fragments),) = by_file(checkpoint.index, plan, requests)
        assert len(list(batches_of(fragments, with_pieces=with_pieces))) == count


def test_two_outputs_of_which_one_has_other_elements_are_filled(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    (large,) = [info for info in INFOS if info.numel == 200_000]
    whole = Request(checkpoint.ids[large.key], Box.whole(large.shape), torch.zeros(large.shape))
    part = Request(checkpoint.ids[large.key], Box((7,), (1000,)), torch.zeros(1000, dtype=torch.bfloat16))
    third = Request(checkpoint.ids[large.key], Box.whole(large.shape), torch.zeros(large.shape))
    checkpoint.read([whole, part])
    assert torch.equal(whole.out, torch.arange(200_000) * 0.5)
    assert torch.equal(part.out, (torch.arange(7, 1007) * 0.5).to(torch.bfloat16))
    checkpoint.read([whole, part, third])
    assert torch.equal(third.out, whole.out)


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "python"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_fragments_are_the_same_from_the_extension_and_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: bool, dtype: torch.dtype
) -> None:
    """Flat parts of matrices, whole rows and columns, into dense outputs and strided ones."""
    if not extension:
        monkeypatch.setattr(checked_read, "available", lambda: False)
    elif dtype is not torch.float16:
        monkeypatch.setattr(reader_module, "deliver_to", deliver_strided)
    infos = [TensorInfo(f"m{at}", "master", "F32", (rows, 300), "parameter") for at, rows in enumerate((40, 1, 700))]
    values = {info.name: torch.randn(info.shape, generator=torch.Generator().manual_seed(info.shape[0])) for info in infos}
    shards = [shard for i in infos for shard in shards_of_flat_range(i, 0, i.numel, values[i.name].view(-1))]
    save(lambda _: Contribution(shards, 1, WRITER), save_dir=str(tmp_path), tag="a", save_latest=True, exchange=alone())
    checkpoint = Checkpoint.open(tmp_path / "a")
    requests, expected = [], []
    for info in infos:
        rows = info.shape[0]
        boxes = [Box((rows // 3, 0), (rows - rows // 3, 300)), Box((0, 0), (1, 299)), Box((rows - 1, 7), (1, 100))]
        boxes += [Box((0, 100), (rows, 50))]
        for box in boxes:
            out = torch.zeros(box.shape, dtype=dtype)
            requests.append(Request(checkpoint.ids[info.key], box, out))
            expected.append(values[info.name][box.slices()].to(dtype))
    checkpoint.read(requests)
    assert all(torch.equal(request.out, value) for request, value in zip(requests, expected, strict=True))
    for request in requests:
        request.out.zero_()
    checkpoint.read(requests[:3])  # without columns: no output is strided
    assert all(torch.equal(request.out, value) for request, value in zip(requests[:3], expected, strict=False))


def deliver_strided(wanted: Any, *arguments: Any) -> None:
    assert any(use.region.shape[1] == 50 for use, _ in wanted)
    deliver(wanted, *arguments)


deliver = reader_module.deliver_to


def test_the_page_cache_fills_outputs_only_if_it_has_their_bytes(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    (name,) = checkpoint.index.files
    outputs = [Request(checkpoint.ids[info.key], Box.whole(info.shape), torch.zeros(info.shape)) for info in INFOS]
    descriptor = os.open(tmp_path / "a" / name, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not checkpoint.fill_from_page_cache(outputs, ranks=1)
    assert not any(request.out.any() for request in outputs)
    (tmp_path / "a" / name).read_bytes()
    assert checkpoint.fill_from_page_cache(outputs, ranks=1)
    assert all(torch.equal(request.out, torch.arange(request.box.numel) * 0.5) for request in outputs)
    os.close(descriptor)
    with open(tmp_path / "a" / name, "r+b") as file:
        end = checkpoint.manifest.file(name).size_bytes - checkpoint.manifest.file(name).table_bytes
        file.seek(end - 1)
        last = file.read(1)[0]
        file.seek(end - 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="checksum of t"):
        checkpoint.fill_from_page_cache(outputs, ranks=1)
