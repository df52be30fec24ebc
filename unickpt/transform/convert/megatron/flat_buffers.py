"""Positions of parameters in the flat buffers of Megatron's distributed optimizer. Pure functions.

``_ParamAndGradBuffer`` (megatron/core/distributed/param_and_grad_buffer.py) concatenates the parameters of a chunk in reverse
order. ``get_parameter_state_dp_zero`` (optimizer/distrib_optimizer.py) writes them without the padding of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 64  # elements; alignment of a parameter in its bucket. A bucket has a larger alignment


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a buffer.

    Attributes:
        numel: number of elements.
        shared: whether it is an embedding that two stages have.
    """

    numel: int
    shared: bool = False


def layout(members: Sequence[Member], bucket_size: int | None) -> tuple[list[int], int]:
    """Return the offset of each parameter in the tensors of the file.

    Args:
        members: parameters in the order of the model.
        bucket_size: number of elements after which a bucket ends; None for a single bucket.

    Returns:
        Offset of the first element of each parameter, and the total number of elements.
    """
    places = [0] * len(members)
    begin = at = 0  # begin of the bucket, and position in it, both without the padding of buckets
    for number in range(len(members) - 1, -1, -1):
        member = members[number]
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if member.shared and at:
            begin, at = begin + at, 0
        places[number] = begin + at
        at += member.numel
        if member.shared or (bucket_size is not None and at >= bucket_size):
            begin, at = begin + at, 0
    return places, begin + at


def bucket_size(
    *, overlapped: bool, pipeline_rank: int, chunk: int, size: int | None, buckets: int | None, parameters: int, data_ranks: int
) -> int | None:
    """Return the number of elements after which a bucket ends, or None for a single bucket.

    See distributed_data_parallel.py and ``get_model`` in training.py.

    Args:
        overlapped: ``--overlap-grad-reduce``.
        pipeline_rank, chunk: stage and chunk. Only the first chunk of the first stage has several buckets.
        size, buckets: ``--ddp-bucket-size`` and ``--ddp-num-buckets``.
        parameters: number of elements of all parameters of the rank.
        data_ranks: number of data and context parallel ranks.
    """
    if not overlapped or pipeline_rank > 0 or chunk > 0:
        return None
    if buckets:
        return parameters // buckets
    return size if size is not None else max(40_000_000, 1_000_000 * data_ranks)
