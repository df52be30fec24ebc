"""Rules for the states of a parameter: weight, master, moments.

New elements of first moments are zero. New elements of second moments are the mean of the tensor, because with zeros the first
step of Adam would be larger than the learning rate (3.2 times at ``beta2`` = 0.999). A parameter that is multiplied by s has a
gradient that is divided by s. A key that is copied n times shares its gradient among the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.transform.convert.readings import Reading
from unickpt.transform.dialects.growth import STREAM, Flow, Norm
from unickpt.transform.grow.free_values import normal
from unickpt.transform.grow.grown_tensor import FillBox, GrownTensor, Mean, constant, mean_along
from unickpt.transform.grow.sizes import Sizes

_VALUES = ("weight", "master")
_FIRST = ("exp_avg", "momentum_buffer", "momentum")
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "sum")
MomentOrder = Literal[0, 1, 2]
_ORDERS: dict[MomentOrder, tuple[str, ...]] = {0: _VALUES, 1: _FIRST, 2: _SECOND}


def order_of(state: str) -> MomentOrder | None:
    """Return 0 for values, 1 and 2 for first and second moments, and None for other states."""
    return next((order for order, names in _ORDERS.items() if state in names), None)


def scale_of(flow: Flow, sizes: Sizes) -> float:
    """Return the factor of the elements of a parameter."""
    return sizes.scale if flow.role == "gain" or flow.epsilon else 1.0


def grown(
    name: str, info: TensorInfo, read: Reading, flow: Flow, sizes: Sizes, origins: Sequence[Ints], norm: Norm, *,
    seed: int, std: float, zero_second_moments: bool = False, new: bool = False,
) -> GrownTensor:  # fmt: skip
    """Return the reading of a state in the grown model.

    Args:
        name: name in the grown model.
        info, read: state of the source; of a similar layer if the layer is new.
        flow: rule.
        sizes: sizes.
        origins: origin of every dimension.
        norm: norm of the stream.
        seed, std: of free elements.
        zero_second_moments: fill second moments with zeros, to show the effect.
        new: whether the layer is new.
    """
    order = order_of(info.state)
    scale = scale_of(flow, sizes)
    factor = {0: scale, 1: 1 / scale, 2: 1 / scale**2}[order or 0]
    shape = tuple(len(origin) for origin in origins)
    if order == 0:
        fill = _values(name, shape, read, flow, sizes, norm, seed, std, new)
    elif order == 1 or zero_second_moments:
        fill = constant(0.0)
    else:
        fill = Mean(read, info.shape, factor)
    if new:
        origins = [np.full_like(origin, -1) for origin in origins]
    return GrownTensor(read, info.dtype, origins, fill, factor, order or 0)


def _values(
    name: str, shape: Sequence[int], read: Reading, flow: Flow, sizes: Sizes, norm: Norm, seed: int, std: float, new: bool
) -> FillBox:
    if flow.role == "reads":
        return lambda box, _cell: normal(seed, name, shape, box, std)
    if flow.role in ("gain", "inner"):
        return constant(1.0)
    if flow.role == "writes" and norm == "layer" and not new:
        return mean_along(read, stream_dim(flow), sizes.old[STREAM])
    return constant(0.0)


def stream_dim(flow: Flow) -> int:
    """Return the dimension of the residual stream in a tensor that writes to it."""
    arrangement = flow.pattern.arrangement
    assert arrangement is not None
    return next(at for at, node in enumerate(arrangement.dimensions) if getattr(node, "name", "") == STREAM)
