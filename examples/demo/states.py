"""Digests of the state of a training, read from a live engine with DeepSpeed's own accessors.

This module does not use unickpt, so that it can verify unickpt. Two engines hold the same state if and only if their digests
are equal, whatever their ZeRO stage and number of ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

Digests = dict[str, str]

MOMENTS = ("exp_avg", "exp_avg_sq")


def weight_digests(engine: Any) -> Digests:
    """Return the digests of all parameters, gathered, and all buffers. Collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"{name} (weight)"] = _digest(parameter)
    for name, buffer in engine.module.named_buffers():
        found[f"{name} (buffer)"] = _digest(buffer)
    return _agreed(found)


def digests(engine: Any) -> Digests:
    """Return the digests of weights, buffers, fp32 masters, Adam's moments and steps, and the schedule. Collective."""
    found = weight_digests(engine)
    for name, parameter in engine.module.named_parameters():
        found[f"{name} (master)"] = _digest(_master(parameter))
        for moment in MOMENTS:
            found[f"{name} ({moment})"] = _digest(_moment(engine, parameter, moment))
    steps = {float(state["step"]) for state in _optimizer(engine).state.values()}
    rates = [group["lr"] for group in _optimizer(engine).param_groups]
    found["Adam's step count"] = repr(sorted(steps))
    found["learning rate"] = repr(rates)
    found["schedule"] = repr(sorted(engine.lr_scheduler.state_dict().items()))
    found["global step and samples"] = repr((engine.global_steps, engine.global_samples))
    return _agreed(found)


def _master(parameter: nn.Parameter) -> Tensor:
    """Return the fp32 master. In fp32 without ZeRO it is the parameter."""
    whole = safe_get_full_fp32_param(parameter)
    return parameter if whole is None else whole


def _moment(engine: Any, parameter: nn.Parameter, key: str) -> Tensor:
    """Return one of Adam's moments, in the shape of the parameter. Without ZeRO, torch's optimizer has it."""
    whole: Tensor | None = safe_get_full_optimizer_state(parameter, key)
    return _optimizer(engine).state[parameter][key] if whole is None else whole


def _optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer, which ZeRO wraps."""
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    content = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{data.dtype} {tuple(data.shape)} {content}"


def _agreed(found: Digests) -> Digests:
    """Return the digests. Raises RuntimeError if they differ between ranks."""
    everyone: list[Digests] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, found)
    torn = [key for key, value in found.items() if any(other.get(key) != value for other in everyone)]
    if torn:
        raise RuntimeError(f"the ranks disagree about {len(torn)} states, such as {torn[:5]}")
    return found
