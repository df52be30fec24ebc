"""Staging buffers: host memory for the copy of the state, so that training continues while it is written.

The memory is allocated and touched once and then kept: a copy into fresh pages costs 20 to 40 times a copy into warm
ones. Data on a device are copied before the call returns, or in the background (``device_copy``).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from unickpt.checkpoint.format.casts import is_dense
from unickpt.checkpoint.save.device_copy import SUPPORTED, DeviceCopies
from unickpt.checkpoint.save.kept import BoundShards
from unickpt.checkpoint.save.late_copy import LateCopy, Watch
from unickpt.checkpoint.save.late_places import LatePlaces, Later, pays
from unickpt.checkpoint.save.places import DenseCopies, Room
from unickpt.checkpoint.save.shards import Shard, in_file_order
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
        later = Later(shards, devices=self._pinned and SUPPORTED) if late else None
        if later is not None and later.pays:
            return self._fill_late(shards, lead_bytes, later)  # the shards with a condition may have no room
        targets, sources, staged = [], [], []
        conditional = 0
        dense = DenseCopies(shards)
        room = Room(self.tensor, lead_bytes, lead_bytes + self.capacity_bytes)
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

    def _fill_late(self, shards: Sequence[Shard], lead_bytes: int, later: Later) -> Staged:
        """As ``fill``: copy what may change at any time, and leave the places and copies of the rest to ``Staged.late``.

        Copies from devices are begun at once, so they need their places at once.
        """
        watch = Watch.of(later.sources)
        copied = [shard if shard in later else replace(shard, data=_copy_of(shard.data)) for shard in shards]
        return self._left(lambda: copied, watch, lead_bytes, on_devices=later.on_devices)

    def fill_kept(self, bound: BoundShards, shards: Sequence[Shard], *, lead_bytes: int = 0) -> Staged | None:
        """As ``fill`` with ``late``, of shards that were described by an earlier save and others.

        Args:
            bound: left to ``Staged.late``.
            shards: the others, which have no condition. Copied at once.

        Returns:
            The shards in the buffer. None if it does not pay to copy later.
        """
        at_once = sum(shard.data.nbytes for shard in shards)
        if not pays(bound.kept.certain_bytes, at_once) or any(shard.unless is not None for shard in shards):
            return None
        if self._copies is not None:
            self._copies.settle()
        self.lead_bytes = lead_bytes
        copied = [replace(shard, data=_copy_of(shard.data)) for shard in shards]
        return self._left(lambda: in_file_order([*bound.shards(), *copied]), bound.watch(), lead_bytes)

    def _left(
        self, shards: Callable[[], Sequence[Shard]], watch: Watch, lead_bytes: int, *, on_devices: bool = False
    ) -> Staged:
        """Leave the places and copies of shards to ``Staged.late``. ``on_devices``: begin those from devices at once."""
        room = Room(self.tensor, lead_bytes, lead_bytes + self.capacity_bytes)
        staged = Staged([], nothing_to_wait_for)
        places = LatePlaces(room, shards, staged.add, self._beyond)
        order = nothing_to_wait_for
        if on_devices:
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

    def add(self, shard: Shard, target: torch.Tensor) -> None:
        """Note the place of a shard in the buffer."""
        self.shards.append(Shard(shard.tensor, shard.box, target))
        self.conditional_bytes += target.nbytes if shard.unless is not None else 0

    def ready(self) -> None:
        """Wait until all data are in the buffer. Any thread may call it, once.

        Raises:
            ChangedError: the state was changed meanwhile.
        """
        self.waiting()
        if self.late is not None:
            self.late.run()


def _copy_of(data: torch.Tensor) -> torch.Tensor:
    return torch.empty(data.shape, dtype=data.dtype, device="cpu").copy_(data.detach())


def _allocated(capacity_bytes: int) -> torch.Tensor:
    region = mmap.mmap(-1, max(capacity_bytes, 1))
    with contextlib.suppress(AttributeError, OSError):  # huge pages, if the system supports them
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    tensor.zero_()
    return tensor


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
