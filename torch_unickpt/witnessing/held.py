"""The parameters of an optimizer of torch, as the witness compares them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.held_state.names import Names
from unickpt.api.dtensors import is_dtensor, placed_tensor
from unickpt.training.witness.held import WEIGHT, Stepped, Tensors, local


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of an optimizer: plain, or a DTensor."""

    parameter: torch.Tensor
    stepped: Stepped


def held_by(optimizer: torch.optim.Optimizer, names: Names, model: torch.nn.Module) -> list[Held]:
    """Return the parameters of an optimizer, in its order."""
    found = []
    for at, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        name = names.of.get(id(parameter), f"parameter {at} of {type(optimizer).__name__}")
        found.append(Held(parameter, Stepped(name, partial(_read, optimizer, parameter), _copies(name, parameter, model))))
    return found


def _read(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Tensors:
    """Return weight and states. The optimizer makes the states in its first step, and replaces them in a load."""
    states = [(str(key), value) for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, torch.Tensor)]
    found = [(WEIGHT, parameter), *sorted(states, key=lambda each: each[0])]
    return [(key, local(value)) for key, value in found]


def _copies(name: str, parameter: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    if is_dtensor(parameter):
        place = placed_tensor(name, parameter, local(parameter).shape)
        return place.ranks if place is not None and len(place.ranks) > 1 else ()
    if isinstance(model, DistributedDataParallel):
        return tuple(sorted(torch.distributed.get_process_group_ranks(model.process_group)))
    return ()
