"""What steps of Megatron's optimizers change on this rank, as the witness compares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_unickpt.framework import internals
from megatron_unickpt.framework.optimizer_internals import Resting, resting, unsupported_reason, weights_follow_late
from unickpt.base.errors import UnsupportedLayoutError
from unickpt.training.witness.held import WEIGHT, Stepped, Tensors
from unickpt.training.witness.updating import Range


def unwrapped(chunk: Any) -> torch.nn.Module:
    """Return the model of a chunk without its wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    found: torch.nn.Module = chunk
    return found


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a rank's chunks by name. Those of several chunks begin with its number."""
    several = len(chunks) > 1
    return {
        f"chunk {at}: {name}" if several else name: parameter
        for at, chunk in enumerate(chunks)
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def held_by(chunks: Sequence[torch.nn.Module], optimizer: Any, copies: Mapping[bool, tuple[int, ...]]) -> list[Stepped]:
    """Return weights, masters and states of this rank, always in the same order.

    All data parallel ranks have the weights. They have masters and states, too, unless the optimizer is distributed.

    Args:
        copies: ranks with the same experts (True), and with the same of all other parameters.

    Raises:
        UnsupportedLayoutError: the state of such an optimizer is unknown.
    """
    reason = unsupported_reason(optimizer)
    if reason:
        raise UnsupportedLayoutError(reason)
    late = weights_follow_late(optimizer)
    of_parameter: dict[int, list[Resting]] = {}
    for each in resting(optimizer):
        of_parameter.setdefault(id(each.parameter), []).append(each)
    found = []
    for name, parameter in named_parameters(chunks).items():
        ranks = copies[internals.is_expert(parameter, name)]
        parts = of_parameter.get(id(parameter), [])
        whole = [tensor for part in parts if part.whole for tensor in part.tensors]
        found.append(_fixed(name, [(WEIGHT, parameter), *whole], ranks if len(ranks) > 1 else (), moving=late))
        divided = [part for part in parts if not part.whole]
        if divided:  # also before the first step, when there may be no state yet: the list must not change
            found.append(_fixed(name, [tensor for part in divided for tensor in part.tensors]))
    return found


def ranges_alone(chunks: Sequence[torch.nn.Module], optimizer: Any, copies: Mapping[bool, tuple[int, ...]]) -> list[Range]:
    """Return what an optimizer steps on of these chunks, and holds alone or divided. ``copies``: see ``held_by``."""
    names = {id(parameter): name for name, parameter in named_parameters(chunks).items()}
    named = ((names.get(id(each.parameter)), each) for each in resting(optimizer) if each.stepped.numel())
    some = [(name, each) for name, each in named if name is not None]  # the optimizer may have parameters of other modules
    return [
        Range(each.stepped, name, 0, each.stepped.numel())
        for name, each in some
        if not each.whole or len(copies[internals.is_expert(each.parameter, name)]) == 1
    ]


def _fixed(name: str, tensors: Tensors, ranks: tuple[int, ...] = (), *, moving: bool = False) -> Stepped:
    held = sorted(((key, tensor.detach()) for key, tensor in tensors), key=lambda each: each[0])
    return Stepped(name, lambda: held, ranks, moving)
