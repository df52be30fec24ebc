"""Staging buffers: host memory for the copy of the state, so that training continues while it is written.

The memory is allocated and touched once and then kept: a copy into fresh pages costs 20 to 40 times a copy into warm
ones. Data on a device are copied before the call returns, or in the background (``device_copy``).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from unickpt.checkpoint.format.casts import TensorCopy, comparison, copy_all, is_cast_of, is_dense
from unickpt.checkpoint.save.device_copy import SUPPORTED, DeviceCopies
from unickpt.checkpoint.save.late_copy import LateCopy, Source, Watch, is_counted
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES

LATE_BYTES = 1 << 20  # less is copied faster than it is noted


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

    def fill(self, shards: Sequence[Shard], *, lead_bytes: int = 0, late: bool = False) -> Staged | None:
        """Copy the data of shards into the buffer, back to back.

        Args:
            shards: in file order. The unconditional ones fit into the buffer.
            lead_bytes: offset of the first shard, so that memory and file have the same block alignment.
            late: leave the copies of steady shards to ``Staged.late``, if that pays.

        Returns:
            The shards in the buffer. None if the shards do not fit.
        """
        if self._copies is not None:
            self._copies.settle()
        self.lead_bytes = lead_bytes
        later = _Later(shards, devices=self._pinned and SUPPORTED) if late else None
        if later is not None and later.pays:
            return self._fill_late(shards, lead_bytes, later)
        targets, sources, staged = [], [], []
        conditional = 0
        dense = DenseCopies(shards)
        room = _Room(self.tensor, lead_bytes, lead_bytes + self.capacity_bytes)
        for shard in shards:
            if shard.unless is not None and dense.derivable(shard, shard.unless):
                continue
            target = room.next(shard.data)
            if target is None:
                return None
            staged.append(Shard(shard.tensor, shard.box, target))
            conditional += target.nbytes if shard.unless is not None else 0
            if is_dense(shard.data):
                dense.add(target, shard.data)
            elif shard.data.numel():
                targets.append(target)
                sources.append(shard.data.detach())
        dense.run()
        return Staged(staged, self._copy(targets, sources)[0], conditional)

    def _fill_late(self, shards: Sequence[Shard], lead_bytes: int, later: _Later) -> Staged | None:
        """As ``fill``: copy what may change at any time, and note the other copies.

        The place of a shard depends on the conditional ones before it, which are not known yet. So what comes behind the
        first of them is copied to its place at the end; what may change at any time has a copy elsewhere until then.
        """
        targets, sources = [], []
        room = _Room(self.tensor, lead_bytes, lead_bytes + self.capacity_bytes)
        placed: list[Shard] = []
        behind: list[Shard] = []
        watched: list[Source] = []
        now = DenseCopies(())
        for shard in shards:
            data = shard.data
            if behind or shard.unless is not None:
                steady = shard in later
                behind.append(shard if steady else replace(shard, data=_copy_of(data)))
                if steady and data.numel():
                    watched.append(Source(shard.tensor.name, data, None))
                    if shard.unless is not None and shard.unless.data_ptr() not in later.places:
                        watched.append(Source(shard.tensor.name, shard.unless, None))
                continue
            target = room.next(data)
            if target is None:
                return None
            placed.append(Shard(shard.tensor, shard.box, target))
            if shard in later and data.numel():
                watched.append(Source(shard.tensor.name, data, target if data.is_cpu else None))
                if data.is_cpu:
                    later.copies.add(target, data)
            elif is_dense(data):
                now.add(target, data)
                continue
            if not data.is_cpu or (not is_dense(data) and data.numel()):
                targets.append(target)
                sources.append(data.detach())
        now.run()
        watch = Watch(watched)
        waiting, order = self._copy(targets, sources, late=True)
        staged = Staged(placed, waiting)

        def finish(same: list[bool]) -> None:
            later.copies.ran(same)
            for shard in behind:
                if shard.unless is not None and later.copies.derivable(shard, shard.unless):
                    continue
                target = room.next(shard.data)
                if target is None:
                    target = self._beyond(shard.data)
                staged.shards.append(Shard(shard.tensor, shard.box, target))
                staged.conditional_bytes += target.nbytes if shard.unless is not None else 0
                later.rest.add(target, shard.data)
            later.rest.run()

        staged.late = LateCopy(later.copies.waiting, watch, finish, order)
        return staged

    def _beyond(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a shard that was expected not to be stored, and has no room in the buffer."""
        return torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)

    def _copy(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], *, late: bool = False
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Copy. What is on a CUDA device is only begun if the buffer is pinned.

        Args:
            late: what follows on the devices need not wait for the copies before the second function is called.

        Returns:
            A function that waits for the copies, and one that orders what follows on the devices after them.
        """
        behind = [self._pinned and source.is_cuda and SUPPORTED for source in sources]
        now = [at for at, each in enumerate(behind) if not each]
        if now:
            torch._foreach_copy_([targets[at] for at in now], [sources[at] for at in now])
        if len(now) == len(behind):
            return nothing_to_wait_for, nothing_to_wait_for
        if self._copies is None:
            self._copies = DeviceCopies(self.tensor)
        begun = [at for at, each in enumerate(behind) if each]
        return self._copies.copy([targets[at] for at in begun], [sources[at] for at in begun], late=late)


@dataclass
class Staged:
    """The shards of a save in a buffer.

    Attributes:
        shards: the shards to write, in file order, with data in the buffer. With ``late`` they are all known after ``ready``.
        waiting: waits until the copies from devices are in host memory.
        conditional_bytes: size of those that had a condition. With ``late`` it is known after ``ready``.
        late: the copies that are made behind training, or None.
    """

    shards: list[Shard]
    waiting: Callable[[], None]
    conditional_bytes: int = 0
    late: LateCopy | None = None

    def ready(self) -> None:
        """Wait until all data are in the buffer. Any thread may call it, once.

        Raises:
            ChangedError: the state was changed meanwhile.
        """
        self.waiting()
        if self.late is not None:
            self.late.run()


def _copy_of(data: torch.Tensor) -> torch.Tensor:
    return torch.empty(data.shape, dtype=data.dtype).copy_(data.detach())


class _Later:
    """What of the shards of a save is copied later.

    Args:
        devices: copies from devices are made behind training.

    Attributes:
        copies: copies in host memory whose places are known at the call.
        rest: those whose places are known after these.
        places: addresses of the tensors of unconditional shards.
        pays: there is enough to copy later.
    """

    def __init__(self, shards: Sequence[Shard], *, devices: bool) -> None:
        self._found = {id(shard) for shard in shards if _may_be_late(shard, devices=devices)}
        self.places = {shard.data.data_ptr() for shard in shards if shard.unless is None}
        self.copies, self.rest = DenseCopies(shards), DenseCopies(())
        size = sum(shard.data.nbytes for shard in shards if id(shard) in self._found)
        conditions = all(shard.unless is None or id(shard) in self._found for shard in shards)
        self.pays = conditions and size >= LATE_BYTES

    def __contains__(self, shard: Shard) -> bool:
        return id(shard) in self._found


def _may_be_late(shard: Shard, *, devices: bool) -> bool:
    """Return whether only a step changes a shard, and it can be watched until then. Strided host memory is copied at once."""
    if not shard.steady:
        return False
    parts = [shard.data] if shard.unless is None else [shard.data, shard.unless]
    return all(is_counted(part) and (is_dense(part) or (devices and part.is_cuda)) for part in parts)


def _allocated(capacity_bytes: int) -> torch.Tensor:
    region = mmap.mmap(-1, max(capacity_bytes, 1))
    with contextlib.suppress(AttributeError, OSError):  # huge pages, if the system supports them
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    tensor.zero_()
    return tensor


class _Room:
    """Places of tensors in a region of memory, one behind the other.

    Args:
        memory: uint8, 1-D.
        begin, end: in bytes.
    """

    def __init__(self, memory: torch.Tensor, begin: int, end: int) -> None:
        self._memory, self._at, self._end = memory, begin, end
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the memory as elements of a dtype

    def next(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the dtype and shape of another one in the next place; None if there is no room for it."""
        at = -(-self._at // like.itemsize) * like.itemsize
        if at + like.nbytes > self._end:
            return None
        self._at = at + like.nbytes
        typed = self._typed.get(like.dtype)
        if typed is None:
            whole = self._memory[: len(self._memory) // like.itemsize * like.itemsize]
            typed = self._typed[like.dtype] = whole.view(like.dtype)
        found = typed.narrow(0, at // like.itemsize, like.numel())
        return found if like.dim() == 1 else found.view(like.shape)


class DenseCopies:
    """Copies of dense CPU tensors. A shard with a condition is compared while ``unless`` is copied, if that comes before it.

    Args:
        shards: all shards, in file order.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.waiting: list[TensorCopy] = []  # not made yet
        self._values: dict[int, torch.Tensor] = {}  # by address of ``unless``
        self._unless: dict[int, int] = {}  # address of ``unless`` of each shard in ``_values``, by ``id``
        self._same: dict[int, bool] = {}  # of the copies that compared, by address of their source
        for shard in shards:
            if shard.unless is not None and _comparable(shard.data, shard.unless):
                place = shard.unless.data_ptr()
                if self._values.setdefault(place, shard.data) is shard.data:
                    self._unless[id(shard)] = place

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy, which ``run`` makes, or the caller."""
        value = self._values.get(source.data_ptr()) if self._values else None
        fits = value is not None and value.numel() == source.numel() and comparison(source.dtype, value.dtype) is not None
        self.waiting.append(TensorCopy(target, source, value if fits else None))

    def run(self) -> None:
        """Make the copies that were noted."""
        self.ran(copy_all(self.waiting, torch.get_num_threads()))

    def ran(self, found: Sequence[bool]) -> None:
        """Note that the copies were made. ``found``: the results of ``copy_all``."""
        for copy, same in zip(self.waiting, found, strict=True):
            if copy.value is not None:
                self._same[copy.source.data_ptr()] = same
        self.waiting = []

    def derivable(self, shard: Shard, unless: torch.Tensor) -> bool:
        """Return whether a shard is the cast of ``unless``."""
        if self.waiting:
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
