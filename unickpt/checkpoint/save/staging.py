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
from unickpt.checkpoint.save.late_copy import LateCopy, Source, Watch
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES

LATE_BYTES = 1 << 20  # less is copied faster than it is noted

_AT_ONCE_BYTES = 1 << 20  # copied twice
_SPARE_SHARE, _SPARE_BYTES = 256, 64 << 10  # for objects that grow, such as counters: a new buffer has fresh pages


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
            return self._fill_late(shards, lead_bytes, later)  # the shards with a condition may have no room
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

    def _fill_late(self, shards: Sequence[Shard], lead_bytes: int, later: _Later) -> Staged:
        """As ``fill``: copy what may change at any time, and leave the places and copies of the rest to ``Staged.late``.

        Copies from devices are begun at once, so they need their places at once.
        """
        watch = Watch(later.sources)
        kept = [shard if shard in later else replace(shard, data=_copy_of(shard.data)) for shard in shards]
        room = _Room(self.tensor, lead_bytes, lead_bytes + self.capacity_bytes)
        staged = Staged([], nothing_to_wait_for)
        places = _LatePlaces(room, kept, staged, self._beyond)
        order = nothing_to_wait_for
        if later.on_devices:
            places.place()
            staged.waiting, order = self._copy(places.targets, places.sources, late=True)
        staged.late = LateCopy(places.place, watch, places.finish, order)
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
        shards: all shards, in file order.
        devices: copies from devices are made behind training.

    Attributes:
        sources: the tensors that are copied or compared later.
        on_devices: some of them are on devices.
        pays: there is enough to copy later, and little to copy at once.
    """

    def __init__(self, shards: Sequence[Shard], *, devices: bool) -> None:
        self.sources: list[Source] = []
        self.on_devices = False
        self._found: set[int] = set()
        copied: set[int] = set()
        at_once, size = 0, 0
        conditions = True
        for shard in shards:
            data, unless = shard.data, shard.unless
            if not shard.steady or not _can_wait(data, devices=devices) or (unless is not None and not _can_wait(unless)):
                at_once += data.nbytes
                conditions = conditions and unless is None
                continue
            self._found.add(id(shard))
            name = shard.tensor.name
            self.sources.append(Source(name, data, compared=unless is not None))
            if unless is None:
                copied.add(data.data_ptr())
                size += data.nbytes
                self.on_devices = self.on_devices or not data.is_cpu
            elif unless.data_ptr() not in copied:
                self.sources.append(Source(name, unless, compared=True))
        self.pays = conditions and size >= LATE_BYTES and at_once <= max(size // 8, _AT_ONCE_BYTES)

    def __contains__(self, shard: Shard) -> bool:
        return id(shard) in self._found


def _can_wait(tensor: torch.Tensor, *, devices: bool = False) -> bool:
    """Return whether a tensor can be watched until a step. Strided host memory is copied at once."""
    return not tensor.is_inference() and (is_dense(tensor) or (devices and tensor.is_cuda))


class _LatePlaces:
    """The places of shards in a buffer that are found behind training.

    The place of a shard depends on the conditional ones before it, which are known when their masters have been copied. So what
    comes behind the first of them gets its place at the end.

    Args:
        room: memory of the buffer.
        shards: all shards, in file order.
        staged: receives the shards in the buffer.
        beyond: returns memory for a shard that has no room.

    Attributes:
        targets, sources: of the copies from devices.
    """

    def __init__(
        self, room: _Room, shards: Sequence[Shard], staged: Staged, beyond: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._room, self._shards, self._staged, self._beyond = room, shards, staged, beyond
        self._behind: Sequence[Shard] = ()
        self._copies: DenseCopies | None = None
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []

    def place(self) -> list[TensorCopy]:
        """Find the places that are known, once. Returns the copies in host memory that are to be made there."""
        if self._copies is not None:
            return self._copies.waiting
        self._copies = DenseCopies(self._shards)
        conditional = (at for at, shard in enumerate(self._shards) if shard.unless is not None)
        first = next(conditional, len(self._shards))
        self._behind = self._shards[first:]
        for shard in self._shards[:first]:
            target = self._placed(shard)
            if shard.data.is_cpu:
                self._copies.add(target, shard.data)
            else:
                self.targets.append(target)
                self.sources.append(shard.data.detach())
        return self._copies.waiting

    def finish(self, same: Sequence[bool]) -> None:
        """Place and copy the rest. ``same``: the results of the copies of ``place``."""
        assert self._copies is not None  # ``place`` was called
        self._copies.ran(same)
        rest = DenseCopies(())
        for shard in self._behind:
            if shard.unless is None or not self._copies.derivable(shard, shard.unless):
                rest.add(self._placed(shard), shard.data)
        rest.run()

    def _placed(self, shard: Shard) -> torch.Tensor:
        target = self._room.next(shard.data)
        if target is None:
            target = self._beyond(shard.data)
        self._staged.shards.append(Shard(shard.tensor, shard.box, target))
        self._staged.conditional_bytes += target.nbytes if shard.unless is not None else 0
        return target


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
        if self.budget_bytes is None:
            wanted += wanted // _SPARE_SHARE + _SPARE_BYTES
        self._buffers.append(_PooledBuffer(StagingBuffer(wanted, pinned=self._pinned)))
        return self._buffers[-1]
