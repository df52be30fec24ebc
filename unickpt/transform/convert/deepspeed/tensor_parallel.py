"""Division of a parameter among DeepSpeed's tensor parallel ranks, from ``universal_checkpoint_info``.

Since version 0.4 it contains the geometry (``affine_map``: deepspeed/checkpoint/affine.py). Earlier versions have patterns of
names (deepspeed/checkpoint/constants.py, ``merge_tp_slices`` in ds_to_universal.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.base.arrays import Shape
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box, contiguous_runs, strides_of
from unickpt.transform.convert.deepspeed.patterns import VOCABULARY, Cut, cut_of, matches

AFFINE_VERSION = 1
# Power of the scale of a piece, by state (SCALE_POWER_BY_STATE in affine.py).
SCALE_POWERS = {"weight": 1, "master": 1, "exp_avg": -1, "exp_avg_sq": -2}


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a rank's tensor and its position in the global tensor.

    Attributes:
        local, whole: the box in the rank's tensor and in the global tensor. Both have the same shape.
        scale: factor between the elements of the rank's tensor and of the global tensor.
        owner: first rank that has the box.
    """

    local: Box
    whole: Box
    scale: float = 1.0
    owner: int = 0

    def up_to(self, shape: Shape) -> PlacedBox | None:
        """Return the part of this box in a smaller global tensor, or None if there is none."""
        kept = self.whole.intersect(Box.whole(shape))
        if kept is None:
            return None
        offset = kept.within(self.whole).start
        start = tuple(a + b for a, b in zip(self.local.start, offset, strict=True))
        return PlacedBox(Box(start, kept.shape), kept, self.scale, self.owner)

    def common(self, box: Box) -> tuple[Box, Box] | None:
        """Return the region that this box has in common with a box of the rank's tensor, or None if there is none.

        Returns:
            The region in the rank's tensor, and in the global tensor.
        """
        region = self.local.intersect(box)
        if region is None:
            return None
        start = tuple(a + b for a, b in zip(self.whole.start, region.within(self.local).start, strict=True))
        return region, Box(start, region.shape)


@dataclass(frozen=True)
class Division:
    """Division of a parameter among ranks.

    Attributes:
        shape: global shape.
        placed: boxes by rank. A box that several ranks have is listed for the first of them.
        averaged: every rank has the whole tensor with its own values, and the mean is used.
    """

    shape: Shape
    placed: tuple[tuple[PlacedBox, ...], ...]
    averaged: bool = False


def undivided(shape: Shape, ranks: int = 1) -> Division:
    """Return the division of a parameter that is replicated on all ranks."""
    return Division(shape, ((PlacedBox(Box.whole(shape), Box.whole(shape)),), *(() for _ in range(ranks - 1))))


def division(name: str, shapes: Sequence[Shape], info: Mapping[str, Any], where: str, *, parts: int = 0) -> Division:
    """Return the division of a parameter.

    Args:
        name: name of the parameter.
        shapes: shape of the parameter on every tensor parallel rank.
        info: ``universal_checkpoint_info``.
        where: name of the file in messages.
        parts: number of equal parts along the first dimension of which every rank has a share, if known from another
            source than ``info``; otherwise 0.

    Raises:
        FormatError: the division is missing, unknown, or does not fit the shapes.
    """
    if len(shapes) == 1:
        return undivided(shapes[0])
    entry = affine_entry(info, name, where)
    found = _affine(name, shapes, entry, where) if entry is not None else _by_patterns(name, shapes, info, where, parts)
    rows = info.get("original_vocab_size")
    listed = any(matches(each, name, where) for each in info.get(VOCABULARY) or ())
    if isinstance(rows, int) and listed and rows < found.shape[0]:
        return _without_padding(found, rows)
    return found


def affine_entry(info: Mapping[str, Any], name: str, where: str, *, trusted: bool = False) -> Mapping[str, Any] | None:
    """Return the entry of a parameter in ``affine_map``, or None. ``trusted`` is that of ``cut_of``.

    Raises:
        FormatError: the map has another version, or several entries match.
    """
    affine = info.get("affine_map") or {}
    if affine and affine.get("version") != AFFINE_VERSION:
        raise FormatError(f"{where}: affine_map has version {affine.get('version')!r}, expected {AFFINE_VERSION}")
    entries: Mapping[str, Any] = affine.get("params") or {}
    found = [value for pattern, value in entries.items() if matches(pattern, name, where, trusted=trusted)]
    if len(found) > 1:
        raise FormatError(f"{where}: {len(found)} patterns of affine_map match {name}, expected at most one")
    return found[0] if found else None


def _affine(name: str, shapes: Sequence[Shape], entry: Mapping[str, Any], where: str) -> Division:
    whole = merged(tuple(entry["logical_shape"]), len(shapes[0]))
    placed = []
    for rank, shape in enumerate(shapes):
        one = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
        if one is None or merged(tuple(one["shard_shape"]), len(shape)) != shape:
            raise FormatError(
                f"{where}: {name} has shape {shape} on tensor parallel rank {rank}, affine_map has {one and one['shard_shape']}"
            )
        placed.append(tuple(piece for piece in affine_boxes(name, entry, rank, len(shape), where) if piece.owner == rank))
    return _checked(Division(whole, tuple(placed)), name, where)


def affine_boxes(name: str, entry: Mapping[str, Any], rank: int, ndim: int, where: str) -> tuple[PlacedBox, ...]:
    """Return all boxes of a rank that are not empty, also those that other ranks have.

    DeepSpeed may describe a matrix of shape ``[heads * width, input]`` as ``[heads, width, input]``. The boxes are those of the
    matrix.

    Args:
        name: name of the parameter.
        entry: affine map of the parameter (``ParamAffineMap.to_dict`` in affine.py).
        rank: tensor parallel rank.
        ndim: number of dimensions of the parameter.
        where: place of the map in messages.

    Raises:
        FormatError: a piece of the map is not a box, or it is outside of its tensor.
    """
    whole: Shape = tuple(entry["logical_shape"])
    one = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
    shape: Shape = tuple(one["shard_shape"])
    boxes = [
        PlacedBox(
            _box(tuple(piece["shape"]), piece["dest"], shape, name, where),
            _box(tuple(piece["shape"]), piece["source"], whole, name, where),
            float(piece.get("scale", 1.0)),
            min(piece.get("locations") or [rank]),
        )
        for piece in one["pieces"]
        if math.prod(piece["shape"])
    ]
    return tuple(boxes) if len(whole) <= ndim else tuple(part for box in boxes for part in _merge(box, shape, whole, ndim))


def merged(view: Shape, ndim: int) -> Shape:
    """Return the shape of a view whose leading dimensions become one, so that it has ``ndim`` dimensions."""
    lead = len(view) - ndim + 1
    return (math.prod(view[:lead]), *view[lead:]) if lead > 1 else view


def _merge(box: PlacedBox, local: Shape, whole: Shape, ndim: int) -> list[PlacedBox]:
    """Return a box of views of tensors as boxes of the tensors (``_merged``).

    Args:
        box: box of the views. Not empty.
        local, whole: shapes of the view of the rank's tensor, and of the view of the global tensor.
        ndim: number of dimensions of the tensors.
    """
    lead = len(whole) - ndim + 1
    runs = []
    for one, shape in ((box.local, local), (box.whole, whole)):
        starts, length = contiguous_runs(Box(one.start[:lead], one.shape[:lead]), shape[:lead])
        runs.append((starts, length, one.start[lead:]))
    step = min(length for _, length, _ in runs)
    found = []
    for at in range(0, math.prod(box.whole.shape[:lead]), step):
        here, there = (
            Box((int(starts[at // length]) + at % length, *start), (step, *box.whole.shape[lead:]))
            for starts, length, start in runs
        )
        found.append(PlacedBox(here, there, box.scale, box.owner))
    return found


def split_boxes(whole: Shape, widths: Sequence[Sequence[int]], dim: int, rank: int) -> tuple[PlacedBox, ...]:
    """Return the boxes of a rank if sub-parameters lie back to back along a dimension, and each is split among the ranks.

    Args:
        whole: global shape.
        widths: extents along ``dim`` by sub-parameter and rank.
        dim: the dimension.
        rank: tensor parallel rank.
    """
    found, local, begin = [], 0, 0
    for each in widths:
        extent = (*whole[:dim], each[rank], *whole[dim + 1 :])
        here, there = (
            Box(tuple(start if d == dim else 0 for d in range(len(whole))), extent)
            for start in (local, begin + sum(each[:rank]))
        )
        found.append(PlacedBox(here, there, owner=rank))
        local, begin = local + each[rank], begin + sum(each)
    return tuple(found)


def _box(extent: Shape, at: Sequence[Any], shape: Shape, name: str, where: str) -> Box:
    """Return a strided view as a box. Raises FormatError if it is not a box."""
    offset, strides = int(at[0]), tuple(at[1])
    if strides != strides_of(shape) or len(extent) != len(shape):
        raise FormatError(f"{where}: a piece of {name} has strides {strides} in a tensor of shape {shape}, expected a box")
    start = []
    for stride in strides:
        start.append(offset // stride if stride else 0)
        offset = offset % stride if stride else offset
    if any(begin + n > size for begin, n, size in zip(start, extent, shape, strict=True)):
        raise FormatError(f"{where}: a piece of {name} ends beyond its tensor of shape {shape}")
    return Box(tuple(start), extent)


def _by_patterns(name: str, shapes: Sequence[Shape], info: Mapping[str, Any], where: str, parts: int) -> Division:
    if not info:
        raise FormatError(
            f"{where}: {name} is divided among {len(shapes)} tensor parallel ranks, but the file has no "
            "universal_checkpoint_info, which DeepSpeed writes for AutoTP since 0.18 and Megatron-DeepSpeed for its models"
        )
    cut = cut_of(name, info, where) or Cut(0)
    return divided(name, shapes, replace(cut, parts=parts) if parts and cut.dim is not None else cut, where)


def divided(name: str, shapes: Sequence[Shape], cut: Cut, where: str) -> Division:
    """Return the division of a parameter whose cut is known.

    Args:
        name: name of the parameter.
        shapes: shape of the parameter on every tensor parallel rank.
        cut: how the ranks divide it.
        where: name of the file or job in messages.

    Raises:
        FormatError: the cut does not fit the shapes.
    """
    if cut.dim is None:
        if len(set(shapes)) > 1:
            raise FormatError(f"{where}: {name} is replicated, but has shapes {sorted(set(shapes))}")
        return Division(shapes[0], undivided(shapes[0], len(shapes)).placed, cut.averaged)
    if cut.view:
        return _divided_view(name, shapes, cut, where)
    dim, parts = cut.dim, cut.parts
    if any(
        len(shape) <= dim or (*shape[:dim], *shape[dim + 1 :]) != (*shapes[0][:dim], *shapes[0][dim + 1 :]) for shape in shapes
    ):
        raise FormatError(f"{where}: {name} has shapes {list(shapes)}, which cannot be concatenated along dimension {dim}")
    whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    for shape in shapes:
        if shape[dim] % parts:
            raise FormatError(f"{where}: {name} of shape {shape} cannot be divided into {parts} equal parts")
    widths = [[shape[dim] // parts for shape in shapes]] * parts
    return Division(whole, tuple(split_boxes(whole, widths, dim, rank) for rank in range(len(shapes))))


def _divided_view(name: str, shapes: Sequence[Shape], cut: Cut, where: str) -> Division:
    """Return the division of a parameter with sub-parameters of several sizes, which may be those of a view of it."""
    assert cut.dim is not None
    dim, ranks, sizes = cut.dim, len(shapes), cut.view[cut.dim]
    assert isinstance(sizes, tuple)
    widths = cut.widths or tuple((size // ranks,) * ranks for size in sizes)
    if any(len(each) != ranks or sum(each) != size for each, size in zip(widths, sizes, strict=True)):
        raise FormatError(f"{where}: {name} has sub-parameters of sizes {sizes}, which {ranks} ranks cannot divide by {widths}")
    total = sum(math.prod(shape) for shape in shapes)
    known = math.prod(size for at, size in enumerate(cut.view) if at != dim and isinstance(size, int) and size >= 0)
    rest = total // (known * sum(sizes)) if known * sum(sizes) else 0
    whole = tuple(sum(s) if isinstance(s, tuple) else rest if s < 0 else s for s in cut.view)
    ndim = len(shapes[0])
    shape, placed = merged(whole, ndim), []
    for rank, local in enumerate(shapes):
        view = (*whole[:dim], sum(each[rank] for each in widths), *whole[dim + 1 :])
        if len(shape) != ndim or merged(view, ndim) != local:
            raise FormatError(
                f"{where}: {name} has shape {local} on tensor parallel rank {rank}, its sub-parameters have shape {view}"
            )
        boxes = [box for box in split_boxes(whole, widths, dim, rank) if box.whole.numel]
        placed.append(tuple(boxes if len(whole) == ndim else (b for box in boxes for b in _merge(box, view, whole, ndim))))
    return _checked(Division(shape, tuple(placed)), name, where)


def _without_padding(found: Division, rows: int) -> Division:
    """Return the division of the first ``rows`` rows."""
    shape = (rows, *found.shape[1:])
    placed = tuple(tuple(cut for box in boxes if (cut := box.up_to(shape)) is not None) for boxes in found.placed)
    return Division(shape, placed, found.averaged)


def _checked(found: Division, name: str, where: str) -> Division:
    """Check that the pieces have all elements. Overlaps are detected when the checkpoint is committed."""
    held = sum(piece.whole.numel for pieces in found.placed for piece in pieces)
    if held != math.prod(found.shape):
        raise FormatError(f"{where}: the ranks have {held:,} elements of {name}, whose shape is {found.shape}")
    return found
