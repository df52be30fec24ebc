"""Staging buffers: host memory for the copy of the state, so that training continues while it is written.

The memory is allocated and touched once and then kept: a copy into fresh pages costs 20 to 40 times a copy into warm
ones. Data on a device are copied before the call returns, or in the background (``device_copy``).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unickpt.checkpoint.format.casts import TensorCopy, comparison, copy_all, is_cast_of, is_dense
from unickpt.checkpoint.save.device_copy import SUPPORTED, DeviceCopies
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES


class StagingBuffer:
    """One region of host memory. ``tensor``: uint8 ``[capacity]``.

    Args:
        capacity_bytes: room for data.
        pinned: copy from devices behind training. The memory is locked at the first such copy.
        memory: uint8 tensor to use; default: fresh memory, with space for ``lead_bytes``.

    Attributes:
        lead_bytes: offset of the first shard of the last ``fill``.
    """

    def __init__(self, capacity_bytes: int, *, pinned: bool = False, memory: torch.Tensor | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.lead_bytes = 0
        self._pinned = pinned
        self._copies: DeviceCopies | None = None
        self.tensor = _allocated(capacity_bytes + BLOCK_BYTES) if memory is None else memory

    def fill(self, shards: Sequence[Shard], *, lead_bytes: int = 0) -> tuple[list[Shard], Callable[[], None]] | None:
        """Copy the data of shards into the buffer, back to back.

        Args:
            shards: in file order. The unconditional ones fit into the buffer.
            lead_bytes: offset of the first shard, so that memory and file have the same block alignment.

        Returns:
            The shards to write, with data in the buffer, and a function that waits for the copies. None if the shards
            do not fit.
        """
        if self._copies is not None:
            self._copies.settle()
        self.lead_bytes = lead_bytes
        targets, sources, staged = [], [], []
        dense = _DenseCopies(shards)
        room = _Room(self.tensor)
        at = lead_bytes
        for shard in shards:
            if shard.unless is not None and dense.derivable(shard, shard.unless):
                continue
            data = shard.data
            at = -(-at // data.itemsize) * data.itemsize
            end = at + data.nbytes
            if end - lead_bytes > self.capacity_bytes:
                return None
            target = room.place(at, data)
            staged.append(Shard(shard.tensor, shard.box, target))
            at = end
            if is_dense(data):
                dense.add(target, data)
            elif data.numel():
                targets.append(target)
                sources.append(data.detach())
        dense.run()
        return staged, self._copy(targets, sources)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
        """Copy. What is on a CUDA device is only begun if the buffer is pinned."""
        later = [self._pinned and source.is_cuda and SUPPORTED for source in sources]
        now = [at for at, behind in enumerate(later) if not behind]
        if now:
            torch._foreach_copy_([targets[at] for at in now], [sources[at] for at in now])
        if len(now) == len(later):
            return nothing_to_wait_for
        if self._copies is None:
            self._copies = DeviceCopies(self.tensor)
        behind = [at for at, each in enumerate(later) if each]
        return self._copies.copy([targets[at] for at in behind], [sources[at] for at in behind])


def _allocated(capacity_bytes: int) -> torch.Tensor:
    region = mmap.mmap(-1, max(capacity_bytes, 1))
    with contextlib.suppress(AttributeError, OSError):  # huge pages, if the system supports them
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    tensor.zero_()
    return tensor


class _Room:
    """Places of tensors in a region of memory. ``memory``: uint8, 1-D."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the memory as elements of a dtype

    def place(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the dtype and shape of another one, ``at`` bytes after the begin: a multiple of its element."""
        typed = self._typed.get(like.dtype)
        if typed is None:
            whole = self._memory[: len(self._memory) // like.itemsize * like.itemsize]
            typed = self._typed[like.dtype] = whole.view(like.dtype)
        found = typed.narrow(0, at // like.itemsize, like.numel())
        return found if like.dim() == 1 else found.view(like.shape)


class _DenseCopies:
    """Copies of dense CPU tensors. A shard with a condition is compared while ``unless`` is copied, if that comes before it.

    Args:
        shards: all shards, in file order.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._waiting: list[TensorCopy] = []
        self._values: dict[int, torch.Tensor] = {}  # by address of ``unless``
        self._unless: dict[int, int] = {}  # address of ``unless`` of each shard in ``_values``, by ``id``
        self._same: dict[int, bool] = {}  # of the copies that compared, by address of their source
        for shard in shards:
            if shard.unless is not None and _comparable(shard.data, shard.unless):
                place = shard.unless.data_ptr()
                if self._values.setdefault(place, shard.data) is shard.data:
                    self._unless[id(shard)] = place

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy, which ``run`` makes."""
        value = self._values.get(source.data_ptr()) if self._values else None
        fits = value is not None and value.numel() == source.numel() and comparison(source.dtype, value.dtype) is not None
        self._waiting.append(TensorCopy(target, source, value if fits else None))

    def run(self) -> None:
        """Make the copies that were noted."""
        found = copy_all(self._waiting, torch.get_num_threads())
        for copy, same in zip(self._waiting, found, strict=True):
            if copy.value is not None:
                self._same[copy.source.data_ptr()] = same
        self._waiting.clear()

    def derivable(self, shard: Shard, unless: torch.Tensor) -> bool:
        """Return whether a shard is the cast of ``unless``."""
        if self._waiting:
            self.run()
        place = self._unless.get(id(shard))
        found = None if place is None else self._same.get(place)
        return is_cast_of(shard.data, unless) if found is None else found


def _comparable(data: torch.Tensor, unless: torch.Tensor) -> bool:
    """Return whether a copy of ``unless`` can compare."""
    return is_dense(data) and is_dense(unless) and comparison(unless.dtype, data.dtype) is not None


def nothing_to_wait_for() -> None:
    """Return at once: the data are already in host memory."""


def size_of(shards: Sequence[Shard]) -> int:
    """Return the size of shards in a buffer, in bytes."""
    at = 0
    for shard in shards:
        item = shard.data.itemsize
        at = -(-at // item) * item + shard.data.nbytes
    return at


def first_that_fits(shards: Sequence[Shard], capacity_bytes: int) -> int:
    """Return the smallest position such that all shards from there on fit into a buffer, including alignment."""
    room = capacity_bytes
    for at in range(len(shards) - 1, -1, -1):
        room -= shards[at].data.nbytes + shards[at].data.itemsize - 1
        if room < 0:
            return at + 1 if size_of(shards) > capacity_bytes else 0
    return 0


@dataclass
class _PooledBuffer:
    buffer: StagingBuffer
    busy: bool = False


class BufferPool(Protocol):
    """Source of staging buffers."""

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> StagingBuffer:
        """Return a buffer for data of a size."""

    def release(self, buffer: StagingBuffer) -> None:
        """Take a buffer back."""


class StagingPool:
    """Pool of staging buffers.

    Args:
        budget_bytes: maximum total size; None for as much as the states need.
        buffers: maximum number of buffers, one per concurrent save.
        pinned: as in ``StagingBuffer``.
    """

    def __init__(self, budget_bytes: int | None = None, *, buffers: int = 1, pinned: bool = False) -> None:
        self.budget_bytes, self.buffers, self._pinned = budget_bytes, buffers, pinned
        self._buffers: list[_PooledBuffer] = []
        self._freed = threading.Condition()

    @property
    def capacity_bytes(self) -> int:
        """Total size of all buffers."""
        return sum(pooled.buffer.capacity_bytes for pooled in self._buffers)

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> StagingBuffer:
        """Return a buffer of at least the given size, or of the budget if that is smaller. Wait until one is free.

        ``notice`` is called once after a wait of ``notice_s``.
        """
        wanted = size_bytes if self.budget_bytes is None else min(size_bytes, self.budget_bytes)
        with self._freed:
            while True:
                found = self._free(wanted)
                if found is not None:
                    found.busy = True
                    return found.buffer
                if not self._freed.wait(notice_s) and notice is not None:
                    notice()
                    notice = None

    def release(self, buffer: StagingBuffer) -> None:
        with self._freed:
            for pooled in self._buffers:
                if pooled.buffer is buffer:
                    pooled.busy = False
            self._freed.notify_all()

    def _free(self, wanted: int) -> _PooledBuffer | None:
        idle = sorted((h for h in self._buffers if not h.busy), key=lambda h: h.buffer.capacity_bytes)
        for pooled in idle:
            if pooled.buffer.capacity_bytes >= wanted:
                return pooled
        busy = [h for h in self._buffers if h.busy]
        taken = sum(h.buffer.capacity_bytes for h in busy)
        if len(busy) >= self.buffers or (self.budget_bytes is not None and taken + wanted > self.budget_bytes):
            return None
        self._buffers = busy  # free the buffers that are too small before a larger one is allocated
        idle.clear()
        self._buffers.append(_PooledBuffer(StagingBuffer(wanted, pinned=self._pinned)))
        return self._buffers[-1]
