"""Division of a parameter among DeepSpeed's tensor parallel ranks, from ``universal_checkpoint_info``.

Since version 0.4 it contains the geometry (``affine_map``: deepspeed/checkpoint/affine.py). Earlier versions have patterns of
names (deepspeed/checkpoint/constants.py, ``merge_tp_slices`` in ds_to_universal.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.errors import FormatError
from unickpt.format.boxes import Box, strides_of

AFFINE_VERSION = 1
MAX_REPETITIONS = 4
# Power of the scale of a piece, by state (SCALE_POWER_BY_STATE in affine.py).
SCALE_POWERS = {"weight": 1, "master": 1, "exp_avg": -1, "exp_avg_sq": -2}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a rank's tensor and its position in the global tensor.

    Attributes:
        local, whole: the box in the rank's tensor and in the global tensor. Both have the same shape.
        scale: factor between the elements of the rank's tensor and of the global tensor.
    """

    local: Box
    whole: Box
    scale: float = 1.0


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
    affine = info.get("affine_map") or {}
    if affine and affine.get("version") != AFFINE_VERSION:
        raise FormatError(f"{where}: affine_map has version {affine.get('version')!r}, expected {AFFINE_VERSION}")
    entry = _match(affine.get("params") or {}, name, where)
    found = _affine(name, shapes, entry, where) if entry is not None else _by_patterns(name, shapes, info, where, parts)
    rows = info.get("original_vocab_size")
    if isinstance(rows, int) and _listed(info, "vocabulary_parameter_patterns", name, where) and rows < found.shape[0]:
        return _without_padding(found, rows)
    return found


def _match(entries: Mapping[str, Any], name: str, where: str) -> Any:
    found = [value for pattern, value in entries.items() if _matches(pattern, name, where)]
    if len(found) > 1:
        raise FormatError(f"{where}: {len(found)} patterns of affine_map match {name}, expected at most one")
    return found[0] if found else None


def _matches(pattern: str, name: str, where: str) -> bool:
    """Return whether a pattern of DeepSpeed matches a name.

    The patterns are regular expressions; those that DeepSpeed generates are escaped names. Matching an arbitrary expression
    from a file can take exponential time, so patterns with groups or many repetitions are refused.
    """
    plain = pattern.removeprefix("^").removesuffix("$")
    if re.sub(r"\\(.)", r"\1", plain) == name:
        return True
    if re.search(r"[\[\](){}|]", plain) or sum(plain.count(each) for each in "+*?") > MAX_REPETITIONS:
        raise FormatError(f"{where}: the name pattern {pattern[:80]!r} is not supported: it has groups or many repetitions")
    return re.match(pattern, name) is not None


def _listed(info: Mapping[str, Any], key: str, name: str, where: str) -> bool:
    return any(_matches(pattern, name, where) for pattern in info.get(key) or ())


def _affine(name: str, shapes: Sequence[Shape], entry: Mapping[str, Any], where: str) -> Division:
    whole: Shape = tuple(entry["logical_shape"])
    placed = []
    for rank, shape in enumerate(shapes):
        one = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
        if one is None or tuple(one["shard_shape"]) != shape:
            raise FormatError(
                f"{where}: {name} has shape {shape} on tensor parallel rank {rank}, affine_map has {one and one['shard_shape']}"
            )
        pieces = []
        for piece in one["pieces"]:
            if min(piece.get("locations") or [rank]) == rank:
                extent = tuple(piece["shape"])
                pieces.append(
                    PlacedBox(
                        _box(extent, piece["dest"], shape, name, where),
                        _box(extent, piece["source"], whole, name, where),
                        float(piece.get("scale", 1.0)),
                    )
                )
        placed.append(tuple(pieces))
    return _checked(Division(whole, tuple(placed)), name, where)


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
    if any(
        _matches(each, name, where) for sub in info.get("parameter_with_sub_params") or () for each in sub.get("patterns", ())
    ):
        raise FormatError(f"{where}: {name} has sub-parameters, which are supported only with affine_map")
    averaged = _listed(info, "parameter_to_average_patterns", name, where)
    if averaged or _listed(info, "tp_replicated_parameter_patterns", name, where):
        if len(set(shapes)) > 1:
            raise FormatError(f"{where}: {name} is replicated, but has shapes {sorted(set(shapes))}")
        return Division(shapes[0], undivided(shapes[0], len(shapes)).placed, averaged)
    dim = 1 if _listed(info, "parameter_with_row_parallelism_patterns", name, where) else 0
    if any(
        len(shape) <= dim or (*shape[:dim], *shape[dim + 1 :]) != (*shapes[0][:dim], *shapes[0][dim + 1 :]) for shape in shapes
    ):
        raise FormatError(f"{where}: {name} has shapes {list(shapes)}, which cannot be concatenated along dimension {dim}")
    parts = parts or (2 if _listed(info, "parameter_with_2_sub_params_cat_dim_0", name, where) else 1)
    whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    placed = []
    begin = 0
    for shape in shapes:
        if shape[dim] % parts:
            raise FormatError(f"{where}: {name} of shape {shape} cannot be divided into {parts} equal parts")
        step = shape[dim] // parts
        pieces = []
        for part in range(parts):
            extent = (*shape[:dim], step, *shape[dim + 1 :])
            local = Box(tuple(part * step if d == dim else 0 for d in range(len(shape))), extent)
            at = part * (whole[dim] // parts) + begin
            pieces.append(PlacedBox(local, Box(tuple(at if d == dim else 0 for d in range(len(shape))), extent)))
        placed.append(tuple(pieces))
        begin += step
    return Division(whole, tuple(placed))


def _without_padding(found: Division, rows: int) -> Division:
    """Return the division of the first ``rows`` rows."""
    kept = Box.whole((rows, *found.shape[1:]))
    placed = []
    for pieces in found.placed:
        cut = []
        for piece in pieces:
            common = piece.whole.intersect(kept)
            if common is not None:
                inside = common.within(piece.whole)
                start = tuple(a + b for a, b in zip(piece.local.start, inside.start, strict=True))
                cut.append(PlacedBox(Box(start, common.shape), common, piece.scale))
        placed.append(tuple(cut))
    return Division(kept.shape, tuple(placed), found.averaged)


def _checked(found: Division, name: str, where: str) -> Division:
    """Check that the pieces have all elements. Overlaps are detected when the checkpoint is committed."""
    held = sum(piece.whole.numel for pieces in found.placed for piece in pieces)
    if held != math.prod(found.shape):
        raise FormatError(f"{where}: the ranks have {held:,} elements of {name}, whose shape is {found.shape}")
    return found
