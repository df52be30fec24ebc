"""Where parameters lie in the flat buffers of Megatron's distributed optimizer. Pure functions.

megatron/core/distributed/param_and_grad_buffer.py (``_ParamAndGradBuffer``) lays a chunk's parameters one after the other, the
last one first; optimizer/distrib_optimizer.py (``get_parameter_state_dp_zero``) writes them without the padding of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 64  # elements; of a parameter's first one within its bucket, whose own first one is aligned to more


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a buffer. Attributes: elements; shared, whether it is an embedding that two stages have."""

    numel: int
    shared: bool = False


def layout(members: Sequence[Member], bucket_size: int | None) -> tuple[list[int], int]:
    """Where each parameter begins in the file's tensors.

    Args:
        members: in the order of the model.
        bucket_size: elements after which a bucket ends; None for one bucket.

    Returns:
        The place of each one's first element, and how many elements there are.
    """
    places = [0] * len(members)
    begin = at = 0  # of this bucket, and in it, both without the padding of buckets
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
    *, overlapped: bool, pipeline_rank: int, chunk: int, told: int | None, buckets: int | None, parameters: int, data_ranks: int
) -> int | None:
    """Elements after which a bucket ends, or None (distributed_data_parallel.py, training.py ``get_model``).

    Args:
        overlapped: ``--overlap-grad-reduce``.
        pipeline_rank, chunk: where it is; only the first chunk of the first stage has several buckets.
        told, buckets: ``--ddp-bucket-size`` and ``--ddp-num-buckets``.
        parameters: elements of all parameters of the rank.
        data_ranks: data and context parallel ones.
    """
    if not overlapped or pipeline_rank > 0 or chunk > 0:
        return None
    if buckets:
        return parameters // buckets
    return told if told is not None else max(40_000_000, 1_000_000 * data_ranks)
