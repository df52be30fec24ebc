"""The boxes of a DTensor that a rank holds. Reads public attributes of ``torch.distributed.tensor`` alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.boxes import Box

Runs = Sequence[tuple[int, int]]  # of one dimension: starts and lengths in the global tensor, in the order of the local one


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The part of a DTensor on this rank.

    Attributes:
        shape: of the local tensor.
        boxes: regions of the global tensor, each with its region of the local tensor. One that may be empty, or several.
        ranks: global ranks with the same regions, ascending.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]
    ranks: tuple[int, ...]


def local_tensor(value: Any) -> torch.Tensor:
    """Return the tensor of this rank of a DTensor; another tensor as it is."""
    if not is_dtensor(value):
        return value  # type: ignore[no-any-return]
    with torch.no_grad():  # three times as fast
        found: torch.Tensor = value.to_local()
    return found


def placed_tensor(key: Any, value: Any, local: Sequence[int]) -> PlacedTensor | None:
    """Return the part of a DTensor on this rank; None if this rank is not in its mesh. ``local``: the shape of its part.

    Dimensions of the mesh divide a dimension of the tensor from the left to the right, in parts as ``torch.chunk`` makes them.
    A ``_StridedShard`` takes a part of each of several equal parts, so a rank may hold several boxes.

    FSDP over tensor parallelism has this placement to the left, but divides what tensor parallelism has left over: a rank
    holds one box. If the rows do not divide, that may be another region than the placements say. The shape of the local
    tensor tells which.

    Raises:
        ConfigError: a placement is not known, or is a sum that is not reduced yet (Partial); or the local tensor has another
            shape than the placements say.
    """
    try:
        return _placed(value.device_mesh, tuple(value.shape), tuple(value.placements), tuple(local))
    except ConfigError as err:
        raise ConfigError(f"{key!r}: {err}") from None


@dataclass(frozen=True, slots=True)
class _Way:
    """How a dimension of the mesh divides one of the tensor: into ``count`` parts, of which this rank has ``here``."""

    dim: int
    factor: int
    count: int
    here: int


@lru_cache(maxsize=4096)  # the layers of a model have the same shapes, and a mesh takes 0.2 ms to say its ranks
def _placed(mesh: Any, shape: tuple[int, ...], placements: tuple[Any, ...], local: tuple[int, ...]) -> PlacedTensor | None:
    here = mesh.get_coordinate()
    if here is None:
        return None
    index, ways = list[Any](), list[_Way]()
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            index.append(slice(None))
            continue
        index.append(here[at])
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            what = "a sum that is not reduced (Partial)" if placement.is_partial() else "not known"
            raise ConfigError(f"is a DTensor with the placement {placement}, which is {what}")
        ways.append(_Way(dim % max(len(shape), 1), getattr(placement, "split_factor", 1), mesh.shape[at], here[at]))
    divisions = {division for division in (_nested(shape, ways), _in_order(shape, ways)) if division is not None}
    fitting = [division for division in divisions if tuple(sum(size for _, size in runs) for runs in division) == local]
    if len(fitting) != 1:
        why = "which fits two divisions" if fitting else "which does not fit"
        raise ConfigError(
            f"is a DTensor of shape {shape} with the placements {placements} on a mesh of shape {tuple(mesh.shape)}, and this "
            f"rank has a tensor of shape {local} of it, {why}; pass a LocalShard"
        )
    ranks = mesh.mesh[tuple(index)].reshape(-1).tolist()
    return PlacedTensor(local, _boxes(fitting[0]), tuple(sorted(ranks)))


def _in_order(shape: Sequence[int], ways: Sequence[_Way]) -> tuple[Runs, ...]:
    """Return what a rank holds if the dimensions of the mesh divide in their order, as the placements say."""
    runs: list[Runs] = [((0, size),) if size else () for size in shape]
    for way in ways:
        pieces = [_chunk(runs[way.dim], way.factor, piece) for piece in range(way.factor)]
        runs[way.dim] = _joined(run for piece in pieces for run in _chunk(piece, way.count, way.here))
    return tuple(runs)


def _nested(shape: Sequence[int], ways: Sequence[_Way]) -> tuple[Runs, ...] | None:
    """Return what a rank holds if strided placements divide what the others leave, as FSDP does; None if they cannot."""
    for at, way in enumerate(ways):
        if way.factor not in (1, math.prod(other.count for other in ways[at + 1 :] if other.dim == way.dim)):
            return None
    return _in_order(shape, [_Way(way.dim, 1, way.count, way.here) for way in sorted(ways, key=lambda way: way.factor)])


def _chunk(runs: Runs, count: int, at: int) -> Runs:
    """Return a part of runs laid end to end, as ``torch.chunk`` makes it."""
    size = -(-sum(length for _, length in runs) // count)
    first, last, begin, found = at * size, (at + 1) * size, 0, []
    for start, length in runs:
        lo, hi = max(first - begin, 0), min(last - begin, length)
        if lo < hi:
            found.append((start + lo, hi - lo))
        begin += length
    return tuple(found)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return runs without a seam between two that follow each other."""
    found: list[tuple[int, int]] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def _boxes(division: Sequence[Runs]) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes of the global tensor, each with its box of the local tensor."""
    lines = []
    for runs in division:
        ends = itertools.accumulate(size for _, size in runs)
        lines.append([(start, end - size, size) for (start, size), end in zip(runs, ends, strict=True)] or [(0, 0, 0)])
    found = []
    for parts in itertools.product(*lines):
        size = tuple(length for _, _, length in parts)
        found.append((Box(tuple(start for start, _, _ in parts), size), Box(tuple(at for _, at, _ in parts), size)))
    return tuple(found)
