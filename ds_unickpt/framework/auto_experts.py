"""AutoEP: the experts of each parameter on this rank. Uses private attributes of DeepSpeed.

AutoEP replaces a block of experts by a layer whose three parameters have all experts of a rank, one after the other along
dimension 0 (module_inject/auto_ep_layer.py). In a checkpoint such a parameter is one tensor with all experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ds_unickpt.framework import internals
from ds_unickpt.placing.slices import Slice, Slices, local_shape
from unickpt.base.arrays import Shape
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.convert.deepspeed.tensor_parallel import PlacedBox


def slices(engine: Any) -> Slices:
    """Return the part of each parameter of experts on this rank. Calls no collective."""
    found = {}
    child: Any
    for _, child in internals.submodules(engine.module):
        if internals.is_auto_expert_layer(child):
            own = internals.auto_experts_of(child)
            for parameter in child.experts.parameters():
                found[id(parameter)] = _slice(local_shape(parameter), own, int(child.num_experts))
    return Slices(found)


def _slice(local: Shape, experts: Sequence[int], total: int) -> Slice:
    boxes = tuple(_boxes(local, experts))
    return Slice((total, *local[1:]), local, boxes, boxes)


def _boxes(local: Shape, experts: Sequence[int]) -> Iterable[PlacedBox]:
    """Yield a box for each run of consecutive experts."""
    rest = local[1:]
    for _, run in itertools.groupby(enumerate(experts), key=lambda each: each[1] - each[0]):
        at = list(run)
        (begin, first), count = at[0], len(at)
        zeros = (0,) * len(rest)
        shape = (count, *rest)
        yield PlacedBox(Box((begin, *zeros), shape), Box((first, *zeros), shape))
