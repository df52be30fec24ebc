"""Writer of the data file of one rank: the header, then all fragments, in large writes without copies on the host."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from unickpt.base.errors import CoverageError
from unickpt.checkpoint.format import block_table
from unickpt.checkpoint.format import rank_rows as rows_module
from unickpt.checkpoint.format.casts import is_dense
from unickpt.checkpoint.format.checksums import (
    BLOCK_BYTES,
    RunningDigest,
    block_checksums,
    block_count,
    block_range,
    combined,
    digest,
)
from unickpt.checkpoint.format.dtypes import byte_view
from unickpt.checkpoint.format.file_names import DATA_FORMAT
from unickpt.checkpoint.format.index import FragmentRow, TensorInfo
from unickpt.checkpoint.format.layout import fragment_key
from unickpt.checkpoint.format.manifest import FileRecord
from unickpt.checkpoint.format.safetensors_header import build_header
from unickpt.checkpoint.save.shards import Prepared, Shard
from unickpt.checkpoint.storage import direct_io
from unickpt.checkpoint.storage.base import Sink, Storage
from unickpt.checkpoint.storage.direct_io import address_of

_BATCH_BYTES = 32 << 20
_BATCH_PARTS = 512  # below IOV_MAX
_CHECKED_BLOCKS = 32  # more leave the cache of the core; fewer take the interpreter's lock more often


class Pace:
    """Bandwidth limit of writes, so that a save does not starve the data loader. None: no limit."""

    def __init__(self, limit_bytes_per_s: float | None) -> None:
        self._limit = limit_bytes_per_s
        self._begin = time.monotonic()
        self._written = 0

    @property
    def batch_bytes(self) -> int:
        """Size of one write: large, but at most the limit for a tenth of a second."""
        return _BATCH_BYTES if self._limit is None else max(min(_BATCH_BYTES, int(self._limit / 10)), 1 << 16)

    def after(self, size_bytes: int) -> None:
        """Count written bytes and wait until the average is below the limit."""
        self._written += size_bytes
        if self._limit is not None:
            time.sleep(max(self._begin + self._written / self._limit - time.monotonic(), 0.0))


@dataclass(slots=True)
class MemoryRun:
    """Data that is adjacent in memory."""

    address: int
    size_bytes: int
    parts: list[memoryview]

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def append(self, data: memoryview) -> None:
        self.parts.append(data)
        self.size_bytes += len(data)

    def memory(self) -> memoryview:
        """Return all of it as one part, which keeps the memory alive."""
        if len(self.parts) == 1:
            return self.parts[0]
        whole = (ctypes.c_ubyte * self.size_bytes).from_address(self.address)
        whole._parts = self.parts  # type: ignore[attr-defined]
        return memoryview(whole).cast("B")


def extend(runs: list[MemoryRun], data: memoryview) -> None:
    """Add data to the last run if it is adjacent to it in memory, and as a new run otherwise. Empty data is left out."""
    if not len(data):
        return
    address = address_of(data)
    if runs and runs[-1].end == address:
        runs[-1].append(data)
    else:
        runs.append(MemoryRun(address, len(data), [data]))


class DataFile:
    """The data file of a rank during writing.

    Args:
        sink: destination.
        shards: all shards of the file, in file order. Their data are not read yet.
        rank, step: for the metadata of the file.
        pace: bandwidth limit.
        header_bytes: least size of the header.
    """

    def __init__(self, sink: Sink, shards: Sequence[Shard], *, rank: int, step: int, pace: Pace, header_bytes: int = 0) -> None:
        slots = [(fragment_key(s.tensor, s.box), s.tensor.dtype, s.box.shape) for s in shards]
        self._table_bytes = block_table.table_bytes(s.size_bytes for s in shards)
        if self._table_bytes:
            slots.append((block_table.TABLE_KEY, "U8", (self._table_bytes,)))
        self._head, self._header = build_header(
            slots,
            {"format": DATA_FORMAT, "rank": str(rank), "step": str(step)},
            alignment=direct_io.BLOCK_BYTES,
            least_bytes=header_bytes,
        )
        self._sink, self._pace = sink, pace
        self._whole = RunningDigest()
        self.rows: list[FragmentRow] = []
        self._blocks: list[tuple[int, array[int]]] = []  # position and checksums of fragments of several blocks
        self._batch: list[MemoryRun] = []
        self._batch_bytes = 0
        self._whole.update(self._head)
        self._put(memoryview(self._head))

    @property
    def next_byte(self) -> int:
        """Position in the file of the data of the next shard."""
        done = len(self.rows)
        slots = self._header.slots
        return self._header.header_bytes + (slots[done - 1].end_byte if done else 0)

    def write(self, shards: Sequence[Shard]) -> None:
        """Append the next shards and pass all of them to the sink, after the last shard with the table of block checksums.

        Shards that are adjacent in memory are written as one part.

        Raises:
            CoverageError: the data of a shard have another size than its box.
        """
        for shard in shards:
            slot = self._header.slots[len(self.rows)]
            data = host_bytes(shard.data)
            if len(data) != slot.end_byte - slot.begin_byte:
                raise CoverageError(f"{slot.name}: {len(data)} bytes, expected {slot.end_byte - slot.begin_byte} for its box")
            offset = self._header.header_bytes + slot.begin_byte
            checksums = self._checksummed(data)
            self.rows.append(FragmentRow(shard.tensor, shard.box, offset, combined(checksums)))
            if len(checksums) > 1:
                self._blocks.append((offset, checksums))
            step = self._pace.batch_bytes
            for at in range(0, len(data), step):
                self._put(data[at : at + step])
        if self._table_bytes and len(self.rows) + 1 == len(self._header.slots):
            table = block_table.to_bytes(self._blocks)
            self._whole.update(table)
            self._put(memoryview(table))
        self._flush()

    def _checksummed(self, data: memoryview) -> array[int]:
        """Return the checksums of the blocks of a fragment, and add it to that of the file. Both read it from the cache."""
        found, count = array("Q"), block_count(len(data), BLOCK_BYTES)
        for first in range(0, count, _CHECKED_BLOCKS):
            begin, end = block_range(first, min(first + _CHECKED_BLOCKS, count), len(data), BLOCK_BYTES)
            found.extend(block_checksums(data[begin:end]))
            self._whole.update(data[begin:end])
        return found

    def _put(self, data: memoryview) -> None:
        extend(self._batch, data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= self._pace.batch_bytes or len(self._batch) >= _BATCH_PARTS:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            self._sink.write([run.memory() for run in self._batch])
            self._pace.after(self._batch_bytes)
        self._batch, self._batch_bytes = [], 0

    def record(self, name: str) -> FileRecord:
        """Write the rest and return the record of the finished file."""
        self._flush()
        size = self._header.header_bytes + (self._header.slots[-1].end_byte if self._header.slots else 0)
        return FileRecord(name, size, self._whole.value(), self._header.header_bytes, digest(self._head), self._table_bytes)


def create_data_file(storage: Storage, name: str, shards: Sequence[Shard], *, direct: bool) -> AbstractContextManager[Sink]:
    """Create a file for the given shards, as ``Storage.create`` does."""
    return storage.create(name, direct=direct, about_bytes=sum(shard.size_bytes for shard in shards))


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
    """Write the data file and the index rows of one rank. Return the record of the data file."""
    with create_data_file(storage, data_name, part.shards, direct=direct) as sink:
        file = DataFile(sink, part.shards, rank=rank, step=part.step, pace=pace or Pace(None))
        file.write(part.shards)
        record = file.record(data_name)
    write_rows(storage, rows_name, file.rows, part.tensors)
    return record


def write_rows(storage: Storage, rows_name: str, rows: list[FragmentRow], tensors: list[TensorInfo]) -> None:
    """Write the index rows of a rank, which the coordinator reads."""
    with storage.create(rows_name) as sink:
        sink.write([memoryview(rows_module.to_bytes(rows, tensors))])


def host_bytes(data: torch.Tensor) -> memoryview:
    """Return the bytes of the elements in row-major order. For a dense CPU tensor it is a view."""
    if is_dense(data) and data.numel():  # without four calls of torch
        memory = (ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())
        memory._tensor = data  # type: ignore[attr-defined]  # keeps it alive
        return memoryview(memory).cast("B")
    dense = data.detach().reshape(-1).to("cpu").resolve_conj().resolve_neg().contiguous()
    return memoryview(byte_view(dense).numpy().data) if dense.numel() else memoryview(b"")
