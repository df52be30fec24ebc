"""Algebra of boxes: half-open n-D regions of global tensors. Pure functions without I/O.

A tensor-parallel shard is one box. A ZeRO partition is a flat range over concatenated parameters. A flat
range of an n-D row-major tensor splits into at most ``2n - 1`` boxes, each contiguous in memory and in the
file (ByteCheckpoint, section 4.3, decomposes irregular shards in the same way). A loader therefore only
intersects boxes.

All offsets and sizes here are in elements, never in bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open region of a tensor: ``start[d] <= index[d] < start[d] + shape[d]``.

    Attributes:
        start: first index in each dimension, each >= 0; ``()`` for a 0-d tensor.
        shape: extent in each dimension, each >= 0; same length as ``start``.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"box start {self.start} and shape {self.shape} differ in their number of dimensions")
        if self.start and (min(self.start) < 0 or min(self.shape) < 0):
            raise ValueError(f"box start {self.start} and shape {self.shape} must not be negative")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(map(add, self.start, self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region of two boxes of one tensor, or None if it is empty."""
        if self.ndim != other.ndim:
            raise ValueError(f"boxes of {self.ndim} and of {other.ndim} dimensions cannot belong to one tensor")
        start = tuple(map(max, self.start, other.start))
        shape = tuple(map(sub, map(min, self.stop, other.stop), start))
        return None if shape and min(shape) <= 0 else Box(start, shape)

    def within(self, outer: Box) -> Box:
        """Return this box in coordinates relative to ``outer``, which contains it."""
        inside = all(
            o <= s and s + n <= o + m for s, n, o, m in zip(self.start, self.shape, outer.start, outer.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{self} is not inside {outer}")
        return Box(tuple(map(sub, self.start, outer.start)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index into a numpy or torch array of the whole tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{s}:{s + n}" for s, n in zip(self.start, self.shape, strict=True)) + "]"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides, in elements, of a dense tensor of this shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def split_flat_range(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Split the flat range ``[lo, hi)`` of a row-major tensor into contiguous boxes.

    Args:
        shape: shape of the whole tensor.
        lo, hi: flat element offsets, ``0 <= lo <= hi <= prod(shape)``.

    Returns:
        At most ``max(1, 2 * ndim - 1)`` boxes in memory order. They cover the range exactly once, and each is
        one contiguous run of the tensor. An empty range gives no boxes.

    Raises:
        ValueError: the range is outside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= lo <= hi <= total:
        raise ValueError(f"flat range [{lo}, {hi}) is outside a tensor of shape {tuple(shape)}")
    return list(_split(tuple(shape), lo, hi)) if lo < hi else []


def cut(box: Box, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` elements, in row-major order, each contiguous within the box.

    A reader always verifies whole fragments, so small fragments keep partial reads cheap.

    Args:
        box: a non-empty box.
        limit: maximum number of elements of a part, at least 1.
    """
    if box.numel <= limit:
        return [box]
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    row = math.prod(box.shape[dim + 1 :])
    step = max(limit // row, 1)
    found = []
    for lo in range(0, box.shape[dim], step):
        extent = min(step, box.shape[dim] - lo)
        part = Box(
            (*box.start[:dim], box.start[dim] + lo, *box.start[dim + 1 :]), (*box.shape[:dim], extent, *box.shape[dim + 1 :])
        )
        found += cut(part, limit)
    return found


def _split(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[Box]:
    """Yield the boxes of a non-empty range. Each recursion step removes the leading dimension."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, head = divmod(lo, row)
    last, tail = divmod(hi, row)
    if first == last:
        yield from (_prepend(first, box) for box in _split(shape[1:], head, tail))
        return
    if head:
        yield from (_prepend(first, box) for box in _split(shape[1:], head, row))
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if tail:
        yield from (_prepend(last, box) for box in _split(shape[1:], 0, tail))


def _prepend(index: int, box: Box) -> Box:
    return Box((index, *box.start), (1, *box.shape))


def flat_range(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the flat range ``(lo, hi)`` of a box in a tensor of this shape, or None if the box is not contiguous."""
    if box.numel == 0:
        return (0, 0)
    lo = sum(s * stride for s, stride in zip(box.start, strides_of(shape), strict=True))
    run = 1
    open_dim = True  # trailing dimensions may be complete, one may be partial, the others must be 1
    for extent, size in zip(reversed(box.shape), reversed(tuple(shape)), strict=True):
        if open_dim:
            run *= extent
            open_dim = extent == size
        elif extent != 1:
            return None
    return (lo, lo + run)


def stretches(box: Box, shape: Sequence[int], nearest: int) -> tuple[Ints, Ints]:
    """Return the flat ranges of a box in a tensor of this shape. Those with at most ``nearest`` elements between them are one.

    Returns:
        Begins and ends, int64 ``[n]``, ascending. There are at most as many as twice the tensor has ``nearest`` elements.
    """
    strides = strides_of(shape)
    dim, run = len(shape), 1
    while dim and strides[dim - 1] - run <= nearest:
        dim -= 1
        run += (box.shape[dim] - 1) * strides[dim]
    begins = np.array([sum(s * stride for s, stride in zip(box.start, strides, strict=True))], np.int64)
    for at in range(dim):
        begins = (begins[:, None] + np.arange(box.shape[at], dtype=np.int64) * strides[at]).reshape(-1)
    return begins, begins + run


def boxes_of_view(shape: Sequence[int], strides: Sequence[int], offset: int, lo: int, hi: int) -> list[tuple[Box, int]]:
    """Return the part of a strided view in the flat range ``[lo, hi)`` of its storage, as boxes of the view.

    An optimizer often holds a flat range of a parameter, while the checkpoint stores views of that parameter
    (gate and up of a fused projection, the experts of a grouped one). If the strides are nested, sorting the
    dimensions by stride puts the elements of the view in storage order, so a range of the storage is one flat
    range of the view.

    Args:
        shape, strides, offset: the view, in elements of the storage.
        lo, hi: range of the storage, in elements.

    Returns:
        ``(box, at)`` pairs: a box in the coordinates of the view, and the storage offset of its first element.
        The boxes are disjoint and cover all elements of the view in the range.

    Raises:
        ValueError: the dimensions are not nested: the view overlaps or interleaves with itself.
    """
    ndim = len(shape)
    if math.prod(shape) == 0 or lo >= hi:
        return []
    order = sorted(range(ndim), key=lambda d: (shape[d] > 1, -strides[d], d))
    extent = [shape[d] for d in order]
    stride = [strides[d] for d in order]
    span = 1
    for n, step in zip(reversed(extent), reversed(stride), strict=True):
        if n > 1:
            if step < span:
                raise ValueError(f"a view of shape {tuple(shape)} with strides {tuple(strides)} is not nested")
            span = step * (n - 1) + span
    first = _count_below(extent, stride, lo - offset)
    last = _count_below(extent, stride, hi - offset)
    back = [order.index(d) for d in range(ndim)]
    found = []
    for box in split_flat_range(extent, first, last):
        at = offset + sum(s * step for s, step in zip(box.start, stride, strict=True))
        found.append((Box(tuple(box.start[b] for b in back), tuple(box.shape[b] for b in back)), at))
    return found


def _count_below(shape: Sequence[int], strides: Sequence[int], limit: int) -> int:
    """Return the number of elements of a nested view (largest stride first, offset 0) below a storage offset."""
    if limit <= 0:
        return 0
    count = 0
    for dim, (n, step) in enumerate(zip(shape, strides, strict=True)):
        if n == 1:
            continue
        inner = math.prod(shape[dim + 1 :])
        whole = (limit - 1) // step  # slabs that end before the limit; the next one may cross it
        if whole >= n:
            return count + n * inner
        count += whole * inner
        limit -= whole * step
    return count + 1


def contiguous_runs(box: Box, shape: Sequence[int]) -> tuple[Ints, int]:
    """Return the runs of consecutive elements of a box in a row-major tensor of this shape.

    Returns:
        ``(offsets, run)``: int64 flat element offset of each run, ascending, and the length of
        every run in elements. An empty box has no runs.
    """
    if box.numel == 0:
        return np.zeros(0, np.int64), 0
    strides = strides_of(shape)
    split = box.ndim  # dimensions [split:] form one run
    run = 1
    while split > 0:
        split -= 1
        run *= box.shape[split]
        if box.shape[split] != shape[split]:
            break
    offsets = np.zeros(1, np.int64)
    for dim in range(split):
        steps = (box.start[dim] + np.arange(box.shape[dim], dtype=np.int64)) * strides[dim]
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    offsets = offsets + sum(box.start[dim] * strides[dim] for dim in range(split, box.ndim))
    return offsets, run


def intersect_many(start_a: Ints, shape_a: Ints, start_b: Ints, shape_b: Ints) -> tuple[Ints, Ints]:
    """Intersect two lists of boxes row by row.

    Args:
        start_a, shape_a, start_b, shape_b: int64 arrays ``[n, ndim]``.

    Returns:
        ``(start, shape)``, int64 ``[n, ndim]``. A row without common elements has an extent <= 0.
    """
    start = np.maximum(start_a, start_b)
    shape = np.minimum(start_a + shape_a, start_b + shape_b) - start
    return start, shape


def find_overlap(
    start: Ints, shape: Ints, group: npt.NDArray[Any] | None = None, *, block: int = 2048
) -> tuple[int, int] | None:
    """Find two boxes of one group that share an element.

    The boxes are sorted along one dimension and split into clusters wherever a box begins after all earlier
    boxes have ended. The other dimensions split the clusters further, in turn. Flat ranges, grids, and flat
    ranges within the cells of a grid separate completely, in a few sorts over all groups at once. Only the
    remaining clusters are compared pair by pair.

    Args:
        start, shape: int64 ``[n, ndim]``, non-empty boxes in any order.
        group: int ``[n]``, >= 0, or None for a single group. Only boxes of one group (for example of one
            tensor) are compared.
        block: rows per step of the pairwise comparison; limits its memory to ``block * n * ndim`` words.

    Returns:
        Positions of two overlapping boxes, or None if every group is disjoint.
    """
    count, ndim = start.shape
    label: Ints = np.zeros(count, np.int64) if group is None else group.astype(np.int64)
    if ndim == 0:
        start, shape, ndim = np.zeros((count, 1), np.int64), np.ones((count, 1), np.int64), 1
    rows: Ints | slice = slice(None)
    groups = quiet = dim = 0
    while len(label) and quiet < ndim:
        begin = start[rows, dim]
        order, cluster = _clusters(label, begin, begin + shape[rows, dim])
        quiet = 0 if int(cluster[-1]) + 1 > groups else quiet + 1
        together = np.bincount(cluster)[cluster] > 1
        kept = order[together]
        rows = kept if isinstance(rows, slice) else rows[kept]
        label = cluster[together]
        groups = 1 + int(np.count_nonzero(np.diff(label)))
        dim = (dim + 1) % ndim
    if not len(label):
        return None
    rows = np.arange(count, dtype=np.int64)[rows]
    for lo, hi in itertools.pairwise([0, *(np.flatnonzero(np.diff(label)) + 1).tolist(), len(label)]):
        clash = _first_overlap(start[rows[lo:hi]], shape[rows[lo:hi]], block)
        if clash is not None:
            return (int(rows[lo + clash[0]]), int(rows[lo + clash[1]]))
    return None


def _clusters(label: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Split the intervals of every label into clusters: a new one begins after all earlier intervals have ended.

    Returns:
        ``(order, cluster)``: positions sorted by label and begin, and the ascending cluster number of each.
    """
    span = int(end.max())
    if (int(label.max()) + 1) * span >= 2**62:  # the keys below would overflow: replace values by ranks
        label = np.unique(label, return_inverse=True)[1]
        values = np.unique(np.concatenate([begin, end]))
        begin, end, span = np.searchsorted(values, begin), np.searchsorted(values, end), len(values)
    key = label * span + begin  # sorts by label, then by begin; intervals of different labels do not overlap
    order = sort_order(key)
    key, reach = key[order], np.maximum.accumulate((label * span + end)[order])
    cluster = np.zeros(len(key), np.int64)
    np.cumsum(key[1:] >= reach[:-1], out=cluster[1:])
    return order, cluster


def sort_order(key: npt.NDArray[np.integer[Any]]) -> Ints:
    """Return the stable ``argsort`` of a key.

    Rows of ranks consist of ascending runs. The stable sort merges them, several times faster than a sort of random numbers.
    """
    return np.argsort(key, kind="stable")


def _first_overlap(start: Ints, shape: Ints, block: int) -> tuple[int, int] | None:
    """Find two overlapping boxes of one list by comparing all pairs that overlap in the first dimension."""
    count = len(start)
    order = np.lexsort(start.T[::-1])
    begin, end = start[order], (start + shape)[order]
    for lo in range(0, count, block):
        hi = min(lo + block, count)
        reach = int(np.searchsorted(begin[:, 0], end[lo:hi, 0].max(), side="left"))
        if reach <= lo + 1:
            continue
        a_begin, a_end = begin[lo:hi, None], end[lo:hi, None]
        b_begin, b_end = begin[None, lo:reach], end[None, lo:reach]
        hit = np.all((a_begin < b_end) & (b_begin < a_end), axis=2)
        hit &= np.arange(lo, hi)[:, None] < np.arange(lo, reach)[None, :]
        if hit.any():
            a, b = np.argwhere(hit)[0]
            return (int(order[lo + a]), int(order[lo + b]))
    return None
