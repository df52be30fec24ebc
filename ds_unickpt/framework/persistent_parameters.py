"""Gathers the parameters that ZeRO-3 keeps whole on every rank (``stage3_param_persistence_threshold``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 64 << 20  # gathered at once: a threshold may be so high that the whole model persists


def gather(parameters: Sequence[Any]) -> None:
    """Gather released parameters: one message for all of one process group, device and dtype. It is a collective.

    DeepSpeed sends one message per parameter (``_allgather_params_coalesced`` in zero/partition_parameters.py). With gloo that
    takes 0.3 ms each, and versions before 0.19 wait for the last one only. Its way for several at once,
    ``all_gather_coalesced``, rounds the values under ``torch_autocast``.

    Args:
        parameters: ``persistent_parameters`` of the optimizer. Those that are quantised, on NVMe or partitioned by MiCS stay
            released: ``all_gather`` of DeepSpeed gathers them.
    """
    for together in _messages([parameter for parameter in parameters if _is_plain(parameter)]):
        group = together[0].ds_process_group
        mine = torch.cat([parameter.ds_tensor.detach().view(-1) for parameter in together]).to(together[0].device)
        ranks = dist.get_world_size(group)
        every = torch.empty(ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
        if mine.numel():
            dist.all_gather_into_tensor(every.view(torch.uint8), mine.view(torch.uint8), group=group)
        parts = torch.split(every.view(ranks, mine.numel()), [parameter.ds_tensor.numel() for parameter in together], dim=1)
        for parameter, part in zip(together, parts, strict=True):
            own = part.clone(memory_format=torch.contiguous_format)  # a view keeps the message alive, and strides of its own
            parameter.data = own.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = type(parameter.ds_status).AVAILABLE


def _is_plain(parameter: Any) -> bool:
    """Whether a parameter is released, and its partition is in memory in the dtype of the parameter."""
    part = parameter.ds_tensor
    return (
        parameter.ds_status.name == "NOT_AVAILABLE"
        and getattr(getattr(part, "status", None), "name", "") == "AVAILABLE"  # else DeepSpeed gathers it
        and part.dtype == parameter.dtype
        and not hasattr(part, "ds_quant_scale")
        and not hasattr(getattr(parameter, "ds_secondary_tensor", None), "ds_quant_scale")
        and getattr(parameter, "comm", None) is None  # groups of MiCS
    )


def _messages(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide parameters into messages. The order is the same on all ranks."""
    kinds: dict[object, list[Any]] = {}
    for parameter in parameters:
        kind = (id(parameter.ds_process_group), parameter.dtype, parameter.device)
        kinds.setdefault(kind, []).append(parameter)
    for same in kinds.values():
        message: list[Any] = []
        size = 0
        for parameter in same:
            more = parameter.ds_numel * parameter.element_size()
            if message and size + more > _MESSAGE_BYTES:
                yield message
                message, size = [], 0
            message.append(parameter)
            size += more
        yield message


def is_gathered(parameter: Any) -> bool | None:
    """Whether a persistent parameter of ZeRO-3 is whole on this rank now; None for one that is not persistent."""
    if not getattr(parameter, "ds_persist", False):
        return None
    return str(parameter.ds_status.name) == "AVAILABLE"
