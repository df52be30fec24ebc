"""Parallel layouts, and the boxes of parameters that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.metadata_scale.models import Model, Parameter
from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.boxes import Box


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees of a job.

    Within a pipeline stage, the tensor parallel rank varies fastest, then the data parallel one. For experts, the expert
    parallel rank varies fastest, then the copy.
    """

    world: int
    tp: int
    pp: int
    zero: int  # 1 or 3
    ep: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp) or self.world % (self.ep * self.pp):
            raise ValueError(f"{self}: the degrees do not divide the number of ranks")

    @property
    def per_stage(self) -> int:
        return self.world // self.pp

    def __str__(self) -> str:
        experts = f" EP {self.ep}" if self.ep > 1 else ""
        return f"TP {self.tp} PP {self.pp}{experts} DP {self.per_stage // self.tp}, ZeRO-{self.zero}"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Boxes of parameters that the ranks of one stage hold, in their order on the rank.

    Attributes:
        rank: int64 ``[k]``, rank within the stage, ascending.
        run: int64 ``[k]``, number of the flat range that the box is a part of, ascending. A range lies on one rank.
        parameter: int64 ``[k]``, position in ``Model.parameters``.
        start, shape: int64 ``[k, ndim]``, box in the global tensor, padded like the index.
    """

    rank: Ints
    run: Ints
    parameter: Ints
    start: Ints
    shape: Ints


def pieces_of_stage(model: Model, layout: Layout, stage: int, *, only: int | None = None) -> Pieces:
    """Return the boxes of one state that the ranks of a stage write, or with ``only`` one rank of it.

    ZeRO-1 concatenates the parameters of a model parallel rank and divides them into equal ranges, one per data parallel
    rank. ZeRO-3 divides every parameter. The first rank of a tensor parallel group writes copies.
    """
    numbers = model.stage(stage, layout.pp)
    ndim = max(len(parameter.shape) for parameter in model.parameters)
    found = []
    dense = [at for at in numbers if not model.parameters[at].expert]
    for tp in range(layout.tp):
        blocks = [_tensor_parallel_block(model.parameters[at], tp, layout.tp) for at in dense]
        owned = np.array([tp == 0 or model.parameters[at].split is not None for at in dense], bool)
        found.append(_held(dense, blocks, owned, ndim, layout, first=tp, group=layout.tp, only=only))
    experts = [at for at in numbers if model.parameters[at].expert]
    for ep in range(layout.ep if experts else 0):
        lists, blocks = [], []
        for at in experts:
            shape = model.parameters[at].shape
            each = shape[0] // layout.ep
            for expert in range(ep * each, (ep + 1) * each):  # each expert is a separate parameter of the optimizer
                lists.append(at)
                blocks.append(Box((expert, 0, 0), (1, *shape[1:])))
        found.append(_held(lists, blocks, np.ones(len(lists), bool), ndim, layout, first=ep, group=layout.ep, only=only))
    rank, length, parameter, start, shape = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.argsort(rank, kind="stable")
    run = np.cumsum(length[order])  # ``length`` marks the first box of every range with 1
    return Pieces(rank[order], run, parameter[order], start[order], shape[order])


def _tensor_parallel_block(parameter: Parameter, tp: int, degree: int) -> Box:
    start, shape = [0] * len(parameter.shape), list(parameter.shape)
    if parameter.split is not None:
        shape[parameter.split] //= degree
        start[parameter.split] = tp * shape[parameter.split]
    return Box(tuple(start), tuple(shape))


def _held(
    numbers: Sequence[int], blocks: Sequence[Box], owned: np.ndarray, ndim: int, layout: Layout, *,
    first: int, group: int, only: int | None,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:  # fmt: skip
    """Return the pieces of the ranks ``first``, ``first + group``, ..., which divide these blocks."""
    none = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), *(np.zeros((0, ndim), np.int64),) * 2
    if not numbers or (only is not None and only % group != first):
        return none
    numels = np.array([block.numel for block in blocks], np.int64)
    part, block, lo, hi = flat_ranges(numels, layout.per_stage // group, layout.zero)
    keep = owned[block] if only is None else owned[block] & (part == only // group)
    part, block, lo, hi = part[keep], block[keep], lo[keep], hi[keep]
    shapes, starts = np.ones((len(blocks), ndim), np.int64), np.zeros((len(blocks), ndim), np.int64)
    for at, box in enumerate(blocks):
        shapes[at, : box.ndim], starts[at, : box.ndim] = box.shape, box.start
    which, start, shape = split_flat_ranges(shapes[block], lo, hi)
    begins = np.ones(len(which), np.int64)
    begins[1:] = which[1:] != which[:-1]
    origin = block[which]
    return first + group * part[which], begins, np.array(numbers, np.int64)[origin], start + starts[origin], shape


def flat_ranges(numels: Ints, parts: int, zero: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return ``(part, tensor, lo, hi)``, sorted by part: the flat range ``[lo, hi)`` of a tensor that a part holds."""
    ends = np.cumsum(numels)
    if zero == 1:
        size = -(-int(ends[-1]) // parts)
        cuts = np.minimum(np.arange(parts + 1, dtype=np.int64) * size, ends[-1])
        edges = np.unique(np.concatenate([cuts, ends]))
        begin, end = edges[:-1], edges[1:]
        tensor = np.searchsorted(ends, begin, side="right")
        first = ends[tensor] - numels[tensor]
        return begin // size, tensor, begin - first, end - first
    size = -(-numels // parts)
    part = np.repeat(np.arange(parts, dtype=np.int64), len(numels))
    tensor = np.tile(np.arange(len(numels), dtype=np.int64), parts)
    lo = np.minimum(part * size[tensor], numels[tensor])
    hi = np.minimum(lo + size[tensor], numels[tensor])
    keep = lo < hi
    return part[keep], tensor[keep], lo[keep], hi[keep]


def split_flat_ranges(shape: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Split many flat ranges into boxes at once, as ``unickpt.checkpoint.format.boxes.split_flat_range`` splits one.

    Args:
        shape: int64 ``[n, ndim]``, shapes of the tensors; ``ndim`` >= 1.
        lo, hi: int64 ``[n]``, half-open ranges, none empty.

    Returns:
        ``(which, start, shape)``: number of the range, and the box. Ordered by range, then by position in memory.
    """
    count, ndim = shape.shape
    strides = np.ones((count, ndim), np.int64)
    for dim in range(ndim - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shape[:, dim + 1]
    which, start = np.arange(count, dtype=np.int64), np.zeros((count, ndim), np.int64)
    whole: list[tuple[Ints, Ints, Ints]] = []
    for dim in range(ndim):  # the remaining ranges lie within one element of the preceding dimensions
        row = strides[which, dim]
        first, head = np.divmod(lo, row)
        last, tail = np.divmod(hi, row)
        same = first == last
        begin = first + (head > 0)
        middle = ~same & (begin < last)
        at = start[middle]
        at[:, dim] = begin[middle]
        extent = np.ones_like(at)
        extent[:, dim] = (last - begin)[middle]
        extent[:, dim + 1 :] = shape[which[middle], dim + 1 :]
        whole.append((which[middle], at, extent))
        rest = []
        for chosen, index, low, high in (
            (same, first, head, tail),
            (~same & (head > 0), first, head, row),
            (~same & (tail > 0), last, np.zeros_like(tail), tail),
        ):
            inner = start[chosen]
            inner[:, dim] = index[chosen]
            rest.append((which[chosen], inner, low[chosen], high[chosen]))
        which, start, lo, hi = (np.concatenate(columns) for columns in zip(*rest, strict=True))
    found, starts, shapes = (np.concatenate(columns) for columns in zip(*whole, strict=True))
    order = np.lexsort(((starts * strides[found]).sum(axis=1), found))
    return found[order], starts[order], shapes[order]
