"""The part of each parameter on this rank: by AutoTP, by the user's own layers with an ``mpu``, or of experts by AutoEP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import get_process_group_ranks

from ds_unickpt.framework import autotp, internals, megatron_layers
from ds_unickpt.placing.slices import RankValues, Slice, Slices, local_shape
from unickpt.base.arrays import Shape
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.convert.deepspeed.tensor_parallel import PlacedBox


def degree(engine: Any) -> int:
    """Return the number of tensor-parallel ranks; 1 without tensor parallelism."""
    return max(autotp.degree(engine), megatron_layers.degree(engine))


def rank(engine: Any) -> int:
    """Return the tensor-parallel rank of this process; 0 without tensor parallelism."""
    return autotp.rank(engine) if autotp.degree(engine) > 1 else megatron_layers.rank(engine)


def slices(engine: Any) -> Slices:
    """Return the part of each parameter on this rank, also of those with experts of AutoEP. Calls no collective.

    Raises:
        FormatError: the description of a parameter is missing or does not fit. The message names the parameter.
    """
    found = autotp.slices(engine) if autotp.degree(engine) > 1 else megatron_layers.slices(engine)
    return Slices({**found.known, **_of_auto_experts(engine)}) if engine.has_moe_layers else found


def _of_auto_experts(engine: Any) -> dict[int, Slice]:
    """Return the part of each parameter with experts of AutoEP, by ``id``.

    AutoEP replaces a block of experts by a layer whose three parameters have all experts of a rank, one after the other along
    dimension 0 (module_inject/auto_ep_layer.py). In a checkpoint such a parameter is one tensor with all experts.
    """
    found: dict[int, Slice] = {}
    child: Any
    for _, child in internals.submodules(engine.module):
        if internals.is_auto_expert_layer(child):
            own = internals.auto_experts_of(child)
            for parameter in child.experts.parameters():
                local = local_shape(parameter)
                boxes = tuple(_boxes(local, own))
                found[id(parameter)] = Slice((int(child.num_experts), *local[1:]), local, boxes, boxes)
    return found


def _boxes(local: Shape, experts: Sequence[int]) -> Iterator[PlacedBox]:
    """Yield a box for each run of consecutive experts."""
    zeros = (0,) * (len(local) - 1)
    for _, run in itertools.groupby(enumerate(experts), key=lambda each: each[1] - each[0]):
        (begin, first), *more = run
        shape = (1 + len(more), *local[1:])
        yield PlacedBox(Box((begin, *zeros), shape), Box((first, *zeros), shape))


def rank_values(engine: Any, parts: Slices) -> RankValues:
    """Return the parameters among ``slices`` of which the tensor-parallel ranks have values of their own. No collective."""
    averaged = frozenset(key for key, part in parts.known.items() if part.averaged)
    if not averaged:
        return RankValues()
    ranks = tuple(sorted(get_process_group_ranks(engine.seq_data_parallel_group)))
    return RankValues(averaged, rank(engine), degree(engine), ranks)
