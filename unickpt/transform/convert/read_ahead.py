"""Reads of a batch of shards into aligned memory, while the batch before it is written.

Direct I/O writes in place what has the same alignment in memory as in the file (``storage/direct_io.py``). Huge pages, and
memory that is used again and stays in the cache of the processor, make these writes faster (docs/evidence/conversion-speed.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.layout import fragment_key
from unickpt.checkpoint.save.data_file import DataFile
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.base import Sink
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES
from unickpt.transform.convert.readings import InPlace, Reading

BATCH_BYTES = 16 << 20  # least size of a batch but the last


@dataclass(frozen=True, slots=True)
class Unread:
    """A shard without its data, and the function that reads them."""

    shard: Shard
    read: Reading


class WriteBehind:
    """A sink that passes everything to another one in a thread of its own. The end of the block waits for all of it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, "unickpt-convert-write")
        self._writes: deque[Future[None]] = deque()
        self._waited = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            self.wait(self.count)

    @property
    def count(self) -> int:
        """Number of writes so far."""
        return self._waited + len(self._writes)

    def write(self, parts: Sequence[memoryview]) -> None:
        """Write parts, whose memory must not change before ``wait`` for this write returns."""
        self._writes.append(self._thread.submit(self._sink.write, parts))

    def wait(self, count: int) -> None:
        """Wait for the first ``count`` writes. Raises what one of them raised."""
        while self._waited < count:
            self._writes[0].result()  # stays the first if it raises
            self._writes.popleft()
            self._waited += 1


def write_all(unread: Sequence[Unread], out: DataFile, sink: WriteBehind, done: Callable[[int], None]) -> None:
    """Read shards in batches and write them in order. A batch is written while the next one is read.

    Args:
        unread: all shards of the file, in file order. Those with larger elements come first.
        out: the file.
        sink: the sink of the file.
        done: called with the number of bytes of each batch when it is read. What it raises ends the work.
    """
    batches = list(_batches(unread))
    memory = [_aligned(max(map(_size, batches), default=0)) for _ in batches[:2]]
    written = [0] * len(memory)  # after this many writes a memory is free
    for number, batch in enumerate(batches):
        turn = number % 2
        sink.wait(written[turn])
        place = memory[turn][out.next_byte % BLOCK_BYTES :]
        shards = []
        for each in batch:
            place, shard = _read(each, place)
            shards.append(shard)
        done(_size(batch))
        out.write(shards)
        written[turn] = sink.count


def _read(unread: Unread, memory: torch.Tensor) -> tuple[torch.Tensor, Shard]:
    """Read a shard into the beginning of ``memory``. Return the rest, and the shard with its data."""
    shard, read = unread.shard, unread.read
    target = memory[: shard.size_bytes].view(torch_dtype(shard.tensor.dtype))
    if isinstance(read, InPlace):
        read.read_into(shard.box, target)
    else:
        found = read(shard.box)
        if (found.dtype, found.numel()) != (target.dtype, target.numel()):
            raise FormatError(
                f"{fragment_key(shard.tensor, shard.box)}: the source has {found.numel():,} elements of {found.dtype}, "
                f"expected {target.numel():,} of {target.dtype}"
            )
        target.copy_(found.reshape(-1))
    return memory[shard.size_bytes :], replace(shard, data=target)


def _batches(unread: Sequence[Unread]) -> Iterator[Sequence[Unread]]:
    lo = size = 0
    for at, each in enumerate(unread, 1):
        size += each.shard.size_bytes
        if size >= BATCH_BYTES or at == len(unread):
            yield unread[lo:at]
            lo, size = at, 0


def _size(batch: Sequence[Unread]) -> int:
    return sum(each.shard.size_bytes for each in batch)


def _aligned(size_bytes: int) -> torch.Tensor:
    """Return memory for a batch that begins anywhere in a block. NumPy asks the system for huge pages."""
    memory = np.empty(size_bytes + 2 * BLOCK_BYTES, np.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % BLOCK_BYTES :])
