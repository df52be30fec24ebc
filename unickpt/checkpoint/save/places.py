"""Places of shards in a region of memory, and the copies of dense CPU tensors to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unickpt.checkpoint.format.casts import TensorCopy, comparison, copy_all, is_cast_of, is_dense
from unickpt.checkpoint.save.shards import Shard


class Room:
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
