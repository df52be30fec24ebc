"""What of the shards of a save is copied behind training, and the places that these copies get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unickpt.checkpoint.format.casts import TensorCopy, is_dense
from unickpt.checkpoint.save.late_copy import Source
from unickpt.checkpoint.save.places import DenseCopies, Room
from unickpt.checkpoint.save.shards import Shard

LATE_BYTES = 1 << 20  # less is copied faster than it is noted

_AT_ONCE_BYTES = 1 << 20  # copied twice


def pays(late_bytes: int, at_once_bytes: int) -> bool:
    """Whether there is enough to copy later, and little to copy at once."""
    return late_bytes >= LATE_BYTES and at_once_bytes <= max(late_bytes // 8, _AT_ONCE_BYTES)


class Later:
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
        self.pays = conditions and pays(size, at_once)

    def __contains__(self, shard: Shard) -> bool:
        return id(shard) in self._found


def _can_wait(tensor: torch.Tensor, *, devices: bool = False) -> bool:
    """Return whether a tensor can be watched until a step. Strided host memory is copied at once."""
    return not tensor.is_inference() and (is_dense(tensor) or (devices and tensor.is_cuda))


class LatePlaces:
    """The places of shards in a buffer that are found behind training.

    The place of a shard depends on the conditional ones before it, which are known when their masters have been copied. So what
    comes behind the first of them gets its place at the end.

    Args:
        room: memory of the buffer.
        shards: returns all shards, in file order.
        placed: receives the shards, each with its place in the buffer.
        beyond: returns memory for a shard that has no room.

    Attributes:
        targets, sources: of the copies from devices.
    """

    def __init__(
        self,
        room: Room,
        shards: Callable[[], Sequence[Shard]],
        placed: Callable[[Shard, torch.Tensor], None],
        beyond: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._room, self._shards, self._note, self._beyond = room, shards, placed, beyond
        self._behind: Sequence[Shard] = ()
        self._copies: DenseCopies | None = None
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []

    def place(self) -> list[TensorCopy]:
        """Find the places that are known, once. Returns the copies in host memory that are to be made there."""
        if self._copies is not None:
            return self._copies.waiting
        shards = self._shards()
        self._copies = DenseCopies(shards)
        first = next((at for at, shard in enumerate(shards) if shard.unless is not None), len(shards))
        self._behind = shards[first:]
        for shard in shards[:first]:
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
        self._note(shard, target)
        return target
