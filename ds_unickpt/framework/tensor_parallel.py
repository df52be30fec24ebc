"""Tensor parallelism of a job: that of AutoTP, or that of the user's own layers with an ``mpu``."""

from __future__ import annotations

from typing import Any

from torch.distributed import get_process_group_ranks

from ds_unickpt.framework import auto_experts, autotp, megatron_layers
from ds_unickpt.placing.slices import RankValues, Slices


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
    return Slices({**found.known, **auto_experts.slices(engine).known}) if engine.has_moe_layers else found


def rank_values(engine: Any, parts: Slices) -> RankValues:
    """Return the parameters of which the tensor-parallel ranks have values of their own. Calls no collective.

    Args:
        engine: the DeepSpeedEngine.
        parts: its ``slices``.
    """
    averaged = frozenset(key for key, part in parts.known.items() if part.averaged)
    if not averaged:
        return RankValues()
    ranks = tuple(sorted(get_process_group_ranks(engine.seq_data_parallel_group)))
    return RankValues(averaged, rank(engine), degree(engine), ranks)
