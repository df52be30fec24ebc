"""The box of a DTensor that a rank holds. Reads public attributes of ``torch.distributed.tensor`` alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.boxes import Box


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The part of a DTensor on this rank.

    Attributes:
        box: region of the global tensor, possibly empty.
        ranks: global ranks with the same region, ascending.
    """

    box: Box
    ranks: tuple[int, ...]


def placed_tensor(key: Any, value: Any) -> PlacedTensor | None:
    """Return the part of a DTensor on this rank; None if this rank is not in its mesh.

    Dimensions of the mesh divide a dimension of the tensor from the left to the right, in parts as ``torch.chunk`` makes them.
    With FSDP over tensor parallelism the placement of FSDP stands to the left, and divides what tensor parallelism has left
    over. torch names it ``_StridedShard``.

    Raises:
        ConfigError: a placement is not known, or is a sum that is not reduced yet (Partial).
    """
    try:
        return _placed(value.device_mesh, tuple(value.shape), tuple(value.placements))
    except ConfigError as err:
        raise ConfigError(f"{key!r}: {err}") from None


@lru_cache(maxsize=4096)  # the layers of a model have the same shapes, and a mesh takes 0.2 ms to say its ranks
def _placed(mesh: Any, shape: tuple[int, ...], placements: tuple[Any, ...]) -> PlacedTensor | None:
    here = mesh.get_coordinate()
    if here is None:
        return None
    start, extent, index = [0] * len(shape), list(shape), list[Any]()
    ways: list[tuple[int, int, int]] = []  # dimension of the tensor, dimension of the mesh, split factor
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            index.append(slice(None))
            continue
        index.append(here[at])
        dim, strided = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if dim is None or placement.is_partial():
            what = "a sum that is not reduced (Partial)" if placement.is_partial() else "not known"
            raise ConfigError(f"is a DTensor with the placement {placement}, which is {what}")
        ways.append((dim % max(len(shape), 1), at, strided))
        right = math.prod(
            mesh.shape[after]
            for after, other in enumerate(placements)
            if after > at and getattr(other, "dim", None) == placement.dim
        )
        if strided > 1 and (strided != right or shape[dim] % (strided * mesh.shape[at])):
            raise ConfigError(
                f"is a DTensor of shape {shape} with the placements {placements}, in which {placement} "
                "gives a rank several boxes; pass a LocalShard under a name of its own for each"
            )
    for dim, at, _ in sorted(ways, key=lambda way: way[2]):  # strided placements divide what the others leave
        size = -(-extent[dim] // mesh.shape[at])
        begin = min(here[at] * size, extent[dim])
        start[dim] += begin
        extent[dim] = min(size, extent[dim] - begin)
    ranks = mesh.mesh[tuple(index)].reshape(-1).tolist()
    return PlacedTensor(Box(tuple(start), tuple(extent)), tuple(sorted(ranks)))
