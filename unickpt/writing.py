"""One rank's data file: header, then every fragment, in writes that are large and copy nothing on the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch

from unickpt import rows as rows_module
from unickpt.checksums import RunningDigest, digest, fragment_checksum
from unickpt.contribution import Prepared, Shard
from unickpt.direct_io import BLOCK_BYTES, address_of
from unickpt.errors import CoverageError
from unickpt.fragments import Box
from unickpt.index import FragmentRow, TensorInfo
from unickpt.manifest import FileRecord
from unickpt.safetensors_io import build_header
from unickpt.storage import Sink, Storage

_BATCH_BYTES = 32 << 20
_BATCH_PARTS = 512  # below IOV_MAX


class Pace:
    """Keeps writing below a bandwidth, so that a save does not starve the data loader. None: no limit."""

    def __init__(self, limit_bytes_per_s: float | None) -> None:
        self._limit = limit_bytes_per_s
        self._begin = time.monotonic()
        self._written = 0

    @property
    def batch_bytes(self) -> int:
        """Large writes, but no larger than what may be written in a tenth of a second."""
        return _BATCH_BYTES if self._limit is None else max(min(_BATCH_BYTES, int(self._limit / 10)), 1 << 16)

    def after(self, size_bytes: int) -> None:
        """Wait until the bytes written so far are allowed."""
        self._written += size_bytes
        if self._limit is not None:
            time.sleep(max(self._begin + self._written / self._limit - time.monotonic(), 0.0))


class DataFile:
    """A rank's data file while it is written.

    Args:
        sink: where it goes.
        shards: of the whole file, in its order; their data are not looked at.
        rank, step: for the file's metadata.
        pace: of the writes.
    """

    def __init__(self, sink: Sink, shards: Sequence[Shard], *, rank: int, step: int, pace: Pace) -> None:
        self._head, self._header = build_header(
            ((fragment_key(s.tensor, s.box), s.tensor.dtype, s.box.shape) for s in shards),
            {"format": "unickpt-data", "rank": str(rank), "step": str(step)},
            alignment=BLOCK_BYTES,
        )
        self._sink, self._pace = sink, pace
        self._whole = RunningDigest()
        self.rows: list[FragmentRow] = []
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._put(memoryview(self._head))

    @property
    def next_byte(self) -> int:
        """Position in the file of the next shard's data."""
        done = len(self.rows)
        slots = self._header.slots
        return self._header.header_bytes + (slots[done - 1].end_byte if done else 0)

    def write(self, shards: Sequence[Shard]) -> None:
        """Append the next shards; all have been handed to the sink when this returns.

        Shards that lie in memory as they shall lie in the file are handed over as one.

        Raises:
            CoverageError: a shard's data are not as long as its box.
        """
        for shard in shards:
            slot = self._header.slots[len(self.rows)]
            data = host_bytes(shard.data)
            if len(data) != slot.end_byte - slot.begin_byte:
                raise CoverageError(f"{slot.name}: {len(data)} bytes where its box has {slot.end_byte - slot.begin_byte}")
            offset = self._header.header_bytes + slot.begin_byte
            self.rows.append(FragmentRow(shard.tensor, shard.box, offset, fragment_checksum(data)))
            step = self._pace.batch_bytes
            for at in range(0, len(data), step):
                self._put(data[at : at + step])
        self._flush()

    def _put(self, data: memoryview) -> None:
        if not len(data):
            return
        self._whole.update(data)
        self._batch = _joined(self._batch, data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= self._pace.batch_bytes or len(self._batch) >= _BATCH_PARTS:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            self._sink.write(self._batch)
            self._pace.after(self._batch_bytes)
        self._batch, self._batch_bytes = [], 0

    def record(self, name: str) -> FileRecord:
        """Of the finished file."""
        self._flush()
        size = self._header.header_bytes + (self._header.slots[-1].end_byte if self._header.slots else 0)
        return FileRecord(name, size, self._whole.value(), self._header.header_bytes, digest(self._head))


def write_rank(
    storage: Storage,
    data_name: str,
    rows_name: str,
    part: Prepared,
    rank: int,
    *,
    pace: Pace | None = None,
    direct: bool = False,
) -> FileRecord:
    """Write one rank's data file and, beside it, its rows of the index."""
    with storage.create(data_name, direct=direct, about_bytes=sum(shard.size_bytes for shard in part.shards)) as sink:
        file = DataFile(sink, part.shards, rank=rank, step=part.step, pace=pace or Pace(None))
        file.write(part.shards)
        record = file.record(data_name)
    write_rows(storage, rows_name, file.rows, part.tensors)
    return record


def _joined(batch: list[memoryview], data: memoryview) -> list[memoryview]:
    """The batch with more data; data that follow the last part in memory become one part with it."""
    if batch:
        begin, length = address_of(batch[-1]), len(batch[-1])
        if begin + length == address_of(data):
            both = (ctypes.c_ubyte * (length + len(data))).from_address(begin)
            both._parts = (batch[-1], data)  # type: ignore[attr-defined]  # that memory stays theirs
            return [*batch[:-1], memoryview(both).cast("B")]
    return [*batch, data]


def write_rows(storage: Storage, rows_name: str, rows: list[FragmentRow], tensors: list[TensorInfo]) -> None:
    """A rank's rows of the index, for the coordinator."""
    with storage.create(rows_name) as sink:
        sink.write([memoryview(rows_module.to_bytes(rows, tensors))])


def host_bytes(data: torch.Tensor) -> memoryview:
    """The elements' bytes in row-major order; a view of the tensor where it is dense and on the CPU."""
    dense = data.detach().reshape(-1).to("cpu").contiguous()
    return memoryview(dense.view(torch.uint8).numpy().data) if dense.numel() else memoryview(b"")


def fragment_key(tensor: TensorInfo, box: Box) -> str:
    """The key of a fragment in its data file: ``name:state``, with its box unless it is all of the tensor."""
    key = f"{tensor.name}:{tensor.state}"
    return key if box == Box.whole(tensor.shape) else f"{key}{box}"
