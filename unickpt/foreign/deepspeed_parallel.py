"""How DeepSpeed's tensor parallel ranks divide a parameter, as it says in its ``universal_checkpoint_info``.

Since version 0.4 of that the geometry is told (``affine_map``: deepspeed/checkpoint/affine.py), before by patterns of names
(deepspeed/checkpoint/constants.py, ``merge_tp_slices`` of ds_to_universal.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.errors import FormatError
from unickpt.fragments import Box, strides_of

AFFINE_VERSION = 1
MAX_REPETITIONS = 4
# By which power of its scale a piece of a state is held (affine.py, SCALE_POWER_BY_STATE).
SCALE_POWERS = {"weight": 1, "master": 1, "exp_avg": -1, "exp_avg_sq": -2}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a rank's tensor, and where it is in the whole.

    Attributes:
        local, whole: the boxes, of one shape.
        scale: the rank's tensor holds the whole's elements times this.
    """

    local: Box
    whole: Box
    scale: float = 1.0


@dataclass(frozen=True)
class Division:
    """A parameter of several ranks.

    Attributes:
        shape: of the whole.
        placed: by rank; what several ranks hold is of the first.
        averaged: every rank holds all of it, and they may differ: the mean counts.
    """

    shape: Shape
    placed: tuple[tuple[Placed, ...], ...]
    averaged: bool = False


def undivided(shape: Shape, ranks: int = 1) -> Division:
    """A parameter of which every rank holds all."""
    return Division(shape, ((Placed(Box.whole(shape), Box.whole(shape)),), *(() for _ in range(ranks - 1))))


def division(name: str, shapes: Sequence[Shape], told: Mapping[str, Any], where: str, *, parts: int = 0) -> Division:
    """How a parameter is divided.

    Args:
        name: of the parameter.
        shapes: of it on every tensor parallel rank.
        told: the ``universal_checkpoint_info``.
        where: names the file in messages.
        parts: equal ones along the first dimension that every rank has, if something but ``told`` tells that; else 0.

    Raises:
        FormatError: nothing tells, or something that is not known, or it does not fit the shapes.
    """
    if len(shapes) == 1:
        return undivided(shapes[0])
    affine = told.get("affine_map") or {}
    if affine and affine.get("version") != AFFINE_VERSION:
        raise FormatError(f"{where}: describes its tensors in version {affine.get('version')!r} of affine_map, 1 is known")
    entry = _match(affine.get("params") or {}, name, where)
    found = _affine(name, shapes, entry, where) if entry is not None else _by_patterns(name, shapes, told, where, parts)
    rows = told.get("original_vocab_size")
    if isinstance(rows, int) and _listed(told, "vocabulary_parameter_patterns", name, where) and rows < found.shape[0]:
        return _without_padding(found, rows)
    return found


def _match(entries: Mapping[str, Any], name: str, where: str) -> Any:
    found = [value for pattern, value in entries.items() if _matches(pattern, name, where)]
    if len(found) > 1:
        raise FormatError(f"{where}: {len(found)} of its patterns match {name}")
    return found[0] if found else None


def _matches(pattern: str, name: str, where: str) -> bool:
    """DeepSpeed's patterns are regular expressions; those that it writes by itself are names with escapes.

    A file may hold what takes for ever to match, so that only such are taken as cannot: no groups, few repetitions.
    """
    plain = pattern.removeprefix("^").removesuffix("$")
    if re.sub(r"\\(.)", r"\1", plain) == name:
        return True
    if re.search(r"[\[\](){}|]", plain) or sum(plain.count(each) for each in "+*?") > MAX_REPETITIONS:
        raise FormatError(f"{where}: the pattern {pattern[:80]!r} for names is not one of those that are read")
    return re.match(pattern, name) is not None


def _listed(told: Mapping[str, Any], key: str, name: str, where: str) -> bool:
    return any(_matches(pattern, name, where) for pattern in told.get(key) or ())


def _affine(name: str, shapes: Sequence[Shape], entry: Mapping[str, Any], where: str) -> Division:
    whole: Shape = tuple(entry["logical_shape"])
    placed = []
    for rank, shape in enumerate(shapes):
        one = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
        if one is None or tuple(one["shard_shape"]) != shape:
            raise FormatError(
                f"{where}: {name} has shape {shape} on tensor parallel rank {rank}, told is {one and one['shard_shape']}"
            )
        pieces = []
        for piece in one["pieces"]:
            if min(piece.get("locations") or [rank]) == rank:
                extent = tuple(piece["shape"])
                pieces.append(
                    Placed(
                        _box(extent, piece["dest"], shape, name, where),
                        _box(extent, piece["source"], whole, name, where),
                        float(piece.get("scale", 1.0)),
                    )
                )
        placed.append(tuple(pieces))
    return _checked(Division(whole, tuple(placed)), name, where)


def _box(extent: Shape, at: Sequence[Any], shape: Shape, name: str, where: str) -> Box:
    """A strided view as the box that it is. Raises FormatError if it is none."""
    offset, strides = int(at[0]), tuple(at[1])
    if strides != strides_of(shape) or len(extent) != len(shape):
        raise FormatError(
            f"{where}: a piece of {name} has strides {strides} in a tensor of shape {shape}, which is no box of it"
        )
    start = []
    for stride in strides:
        start.append(offset // stride if stride else 0)
        offset = offset % stride if stride else offset
    if any(begin + n > size for begin, n, size in zip(start, extent, shape, strict=True)):
        raise FormatError(f"{where}: a piece of {name} ends beyond its tensor of shape {shape}")
    return Box(tuple(start), extent)


def _by_patterns(name: str, shapes: Sequence[Shape], told: Mapping[str, Any], where: str, parts: int) -> Division:
    if not told:
        raise FormatError(
            f"{where}: of {len(shapes)} tensor parallel ranks, and nothing tells how they divide {name} "
            "(universal_checkpoint_info, which DeepSpeed writes for AutoTP since 0.18, and Megatron-DeepSpeed for its models)"
        )
    if any(
        _matches(each, name, where) for sub in told.get("parameter_with_sub_params") or () for each in sub.get("patterns", ())
    ):
        raise FormatError(f"{where}: {name} has sub-parameters, which are read where affine_map tells their geometry")
    averaged = _listed(told, "parameter_to_average_patterns", name, where)
    if averaged or _listed(told, "tp_replicated_parameter_patterns", name, where):
        if len(set(shapes)) > 1:
            raise FormatError(f"{where}: {name} is replicated, but has shapes {sorted(set(shapes))}")
        return Division(shapes[0], undivided(shapes[0], len(shapes)).placed, averaged)
    dim = 1 if _listed(told, "parameter_with_row_parallelism_patterns", name, where) else 0
    if any(
        len(shape) <= dim or (*shape[:dim], *shape[dim + 1 :]) != (*shapes[0][:dim], *shapes[0][dim + 1 :]) for shape in shapes
    ):
        raise FormatError(f"{where}: {name} has shapes {list(shapes)}, which dimension {dim} does not join")
    parts = parts or (2 if _listed(told, "parameter_with_2_sub_params_cat_dim_0", name, where) else 1)
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
            pieces.append(Placed(local, Box(tuple(at if d == dim else 0 for d in range(len(shape))), extent)))
        placed.append(tuple(pieces))
        begin += step
    return Division(whole, tuple(placed))


def _without_padding(found: Division, rows: int) -> Division:
    """The first rows of it."""
    kept = Box.whole((rows, *found.shape[1:]))
    placed = []
    for pieces in found.placed:
        cut = []
        for piece in pieces:
            common = piece.whole.intersect(kept)
            if common is not None:
                inside = common.within(piece.whole)
                start = tuple(a + b for a, b in zip(piece.local.start, inside.start, strict=True))
                cut.append(Placed(Box(start, common.shape), common, piece.scale))
        placed.append(tuple(cut))
    return Division(kept.shape, tuple(placed), found.averaged)


def _checked(found: Division, name: str, where: str) -> Division:
    """All of it is there; that nothing is there twice is checked when a checkpoint is made."""
    held = sum(piece.whole.numel for pieces in found.placed for piece in pieces)
    if held != math.prod(found.shape):
        raise FormatError(f"{where}: the ranks hold {held:,} elements of {name}, whose shape is {found.shape}")
    return found
