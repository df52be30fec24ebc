"""Batches are read into memory that earlier batches may still be written from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from unickpt.base.errors import FormatError, StorageError
from unickpt.checkpoint.format.boxes import Box, strides_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.save.data_file import DataFile, Pace
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.direct_io import DirectSink, address_of
from unickpt.checkpoint.storage.posix import _DescriptorSink
from unickpt.transform.convert import read_ahead
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart, convert
from unickpt.transform.convert.read_ahead import Unread, WriteBehind, write_all
from unickpt.transform.convert.readings import BoxOf


class _Slow:
    """A sink that copies each part late, and its alignment in memory and in the file."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.places: list[tuple[int, int]] = []

    def write(self, parts: Sequence[memoryview]) -> None:
        time.sleep(0.02)
        for part in parts:
            self.places.append((address_of(part) % 4096, len(self.data) % 4096))
            self.data += part


def _written(unread: Sequence[Unread], sink: _Slow) -> None:
    with WriteBehind(sink) as behind:
        out = DataFile(behind, [each.shard for each in unread], rank=0, step=1, pace=Pace(None))
        write_all(unread, out, behind, lambda _: None)
        out.record("data")


def _unread(tensor: torch.Tensor, name: str) -> Unread:
    info = TensorInfo(name, "weight", "F32", tuple(tensor.shape), "parameter")
    box = Box.whole(info.shape)
    return Unread(Shard(info, box, torch.empty(0)), lambda box: tensor[box.slices()].reshape(-1))


def test_memory_is_not_filled_again_before_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read_ahead, "BATCH_BYTES", 10_000)
    tensors = {f"{n:02d}": torch.full((1 + 997 * (n % 4), 3), float(n)) for n in range(20)}
    sink = _Slow()
    _written([_unread(tensor, name) for name, tensor in tensors.items()], sink)
    (tmp_path / "x.safetensors").write_bytes(sink.data)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        found = {key.split(":")[0].split("/")[0]: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert len(found) == len(tensors)
    assert all(torch.equal(value, tensors[key]) for key, value in found.items())
    assert all(memory == at for memory, at in sink.places[1:])  # written in place; the first is the header


def test_a_write_that_was_waited_for_is_forgotten() -> None:
    sink = _Slow()
    with WriteBehind(sink) as behind:
        for n in range(1, 9):
            behind.write([memoryview(bytes([n]))])
            behind.wait(n - 2)
            assert (behind.count, len(behind._writes)) == (n, min(n, 2))
    assert sink.data == bytes(range(1, 9))


@pytest.mark.parametrize("shape", [(6, 5), (30,), (1, 1), (7, 1)])
def test_a_box_of_a_file_is_read_into_place(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(Box.whole(shape).numel, dtype=torch.int64).reshape(shape)
    (tmp_path / "x").write_bytes(b"12345678" + tensor.numpy().tobytes())
    with OpenFiles() as files:
        read = BoxOf(Box.whole(shape), Located(files, tmp_path / "x", 8, "I64", shape, strides_of(shape)))
        for lo in range(shape[-1]):
            box = Box((*(0,) * (len(shape) - 1), lo), (*shape[:-1], shape[-1] - lo))
            target = torch.full((box.numel,), -1)
            read.read_into(box, target)
            assert torch.equal(target, tensor[box.slices()].reshape(-1))
            assert torch.equal(read(box), target)


@pytest.mark.parametrize("found", [torch.zeros(4, dtype=torch.float64), torch.zeros(1), torch.zeros(5)])
def test_another_dtype_or_number_of_elements_is_refused(found: torch.Tensor) -> None:
    unread = _unread(torch.zeros(4), "w")
    with pytest.raises(FormatError, match=rf"the source has {found.numel()} elements of {found.dtype}, expected 4 of"):
        _written([Unread(unread.shard, lambda _: found)], _Slow())


@pytest.mark.parametrize(
    ("target", "what"), [(torch.zeros(4), "4 of torch.float32"), (torch.zeros(3, dtype=torch.int64), "3 of")]
)
def test_memory_of_another_dtype_or_size_is_refused(tmp_path: Path, target: torch.Tensor, what: str) -> None:
    with OpenFiles() as files, pytest.raises(FormatError, match=rf"x: has 4 elements of I64, expected {what}"):
        Located(files, tmp_path / "x", 0, "I64", (4,), (1,)).read_into(Box.whole((4,)), target)


def test_a_write_that_fails_ends_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "BATCH_BYTES", 4)
    read = threading.Semaphore(0)

    def failing(write: Callable[[object, Sequence[memoryview]], None]) -> Callable[[object, Sequence[memoryview]], None]:
        def fails(sink: object, parts: Sequence[memoryview]) -> None:
            if threading.current_thread().name.startswith("unickpt-convert-write"):  # not that of the rows
                raise OSError(28, "No space left on device")
            write(sink, parts)

        return fails

    def reading(box: Box) -> torch.Tensor:
        read.release()
        return torch.zeros(box.numel)

    for kind in (DirectSink, _DescriptorSink):
        monkeypatch.setattr(kind, "write", failing(kind.write))
    infos = [TensorInfo(f"w{n}", "weight", "F32", (2,), "parameter") for n in range(100)]
    parts = [SourcePart(info, Box.whole((2,)), reading) for info in infos]
    with pytest.raises(StorageError, match="No space left on device"):
        convert(Source("test", [Portion("all", parts, [])], Writer("test", "", "", "", "huggingface", {})), tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert read._value < 100  # it does not read the rest
