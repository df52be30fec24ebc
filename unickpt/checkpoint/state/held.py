"""Describes what a rank holds, and finds the shards that it writes. Pure values: no I/O, no communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.shards import Shard


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks that hold the same elements. Each of them writes a part.

    Attributes:
        ranks: these ranks, in an order that is the same on all of them. Empty if other ranks write the elements.
        own: this rank.
    """

    ranks: tuple[int, ...] | range
    own: int

    @property
    def rank(self) -> int:
        """Position of this rank among the ranks that write a part; -1 if this rank writes none."""
        return self.ranks.index(self.own) if self.own in self.ranks else -1

    @property
    def world(self) -> int:
        """Number of ranks that write a part."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Held:
    """One box of a global tensor on this rank.

    Attributes:
        tensor: the global tensor.
        box: region of the tensor.
        data: ``box.numel`` elements in row-major order: in the shape of the box with any strides, or 1-D and contiguous.
        copies: the ranks with the same elements. They hold the same boxes as this rank. None: this rank alone.
        unless: the part of a master with the same box, of the form of ``data``, or None. The elements are stored only where
            they are not its cast.
    """

    tensor: TensorInfo
    box: Box
    data: torch.Tensor
    copies: Copies | None = None
    unless: torch.Tensor | None = None
    steady: bool = False

    @property
    def size_bytes(self) -> int:
        return self.box.numel * itemsize_bytes(self.tensor.dtype)

    def shards(self, lo: int, hi: int) -> Iterator[Shard]:
        """Yield the elements ``[lo, hi)`` of the box, in row-major order, as shards."""
        if hi - lo == self.box.numel:
            yield Shard(self.tensor, self.box, self.data, self.unless, self.steady)
            return
        at = lo
        for part in split_flat_range(self.box.shape, lo, hi):
            box = Box(tuple(a + b for a, b in zip(self.box.start, part.start, strict=True)), part.shape)
            unless = None if self.unless is None else self._part(self.unless, part, at)
            yield Shard(self.tensor, box, self._part(self.data, part, at), unless, self.steady)
            at += part.numel

    def _part(self, data: torch.Tensor, part: Box, at: int) -> torch.Tensor:
        """Return the elements of a part of the box, of which ``at`` elements come before it."""
        return data.detach()[part.slices()] if data.shape == self.box.shape else data.detach().narrow(0, at, part.numel)


@dataclass
class Description:
    """What this rank holds.

    Attributes:
        held: boxes with their elements. All ranks together hold every stored tensor, the same element only on ``copies``.
        tensors: all tensors that this rank knows, also those of which it holds nothing.
    """

    held: list[Held] = field(default_factory=list)
    tensors: list[TensorInfo] = field(default_factory=list)

    def shards(self) -> list[Shard]:
        """Return the shards that this rank writes.

        Of the copies that the same ranks hold, each of these ranks writes the same number of bytes. Copies with a condition
        (``unless``) are divided separately, because usually none of them is written.
        """
        found: list[Shard] = []
        groups: dict[tuple[Copies, bool], list[Held]] = {}
        for held in self.held:
            if held.copies is None:
                found += held.shards(0, held.box.numel)
            elif held.copies.ranks and held.box.numel:
                groups.setdefault((held.copies, held.unless is None), []).append(held)
        for (copies, _), group in groups.items():
            group.sort(key=lambda held: (held.tensor.key, held.box.start))
            for held, (lo, hi) in zip(group, divided(group, copies), strict=True):
                if lo < hi:
                    found += held.shards(lo, hi)
        return found


def divided(group: Sequence[Held], copies: Copies) -> list[tuple[int, int]]:
    """Return the range ``[lo, hi)`` of the elements of each box that one of the ranks with copies writes, possibly empty.

    The boxes are laid end to end and cut into parts of equal size. So all ranks write the same number of bytes, up to one
    element per cut, and exactly one rank writes each element. The ranks do not communicate.

    Args:
        group: the boxes, in an order that is the same on all ranks.
        copies: the ranks, and this one.
    """
    if copies.rank < 0:
        return [(0, 0)] * len(group)
    total = sum(held.size_bytes for held in group)
    begin, end = total * copies.rank // copies.world, total * (copies.rank + 1) // copies.world
    ranges = []
    at = 0
    for held in group:
        item, numel = itemsize_bytes(held.tensor.dtype), held.box.numel
        lo = min(max(-(-(begin - at) // item), 0), numel)
        hi = min(max(-(-(end - at) // item), 0), numel)
        ranges.append((lo, hi))
        at += held.size_bytes
    return ranges
