"""What steps of an engine change on this rank, as the witness compares it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ds_unickpt.framework import internals, partitions, persistent_parameters
from ds_unickpt.framework.fallbacks import UNKNOWN_BUFFERS, require_supported
from ds_unickpt.framework.partitions import ParameterRange, Partition
from ds_unickpt.held_state.engine_view import EngineView
from unickpt.training.witness.held import WEIGHT, Stepped, Tensors

MASTER, GATHERED = "master", "gathered copy"
Copies = Mapping[str, tuple[int, ...]]  # ranks by the keys of ``internals.copy_groups``


def held_by(view: EngineView, copies: Copies) -> list[Stepped]:
    """Return masters, states and weights of an engine, always in the same order.

    Under ZeRO each rank steps on a part of its own, which has no copy. The weights of ZeRO-1 and 2 have copies, and so has all
    without ZeRO. Under ZeRO-3 the persistent parameters have, which are gathered after each step.

    Raises:
        UnsupportedLayoutError: the layout of the optimizer is unknown, or its states lie on NVMe.
    """
    require_supported(view.engine)
    if any(part.swapped is not None or part.weights for part in view.parts):
        raise UNKNOWN_BUFFERS.error("parameters or states lie on NVMe")
    replicated: dict[int, Tensors] = {}
    found = []
    moving = view.base is not None and internals.is_muon(view.base)  # its momentum changes in the backward pass
    for part in view.parts:
        if part.replicated:
            for piece in part.pieces:
                replicated[id(piece.parameter)] = _stepped_on(view, part, piece)
            continue
        found += [_part(view, part, piece, moving=moving) for piece in part.pieces]
    stepped_on = {id(piece.parameter) for part in view.parts for piece in part.pieces}
    for name, parameter in view.names.parameters.items():
        ranks = copies[internals.copy_group_of(parameter)]
        ranks = ranks if len(ranks) > 1 else ()
        found += _weights(name, parameter, ranks, replicated.get(id(parameter), []), id(parameter) in stepped_on)
    return found


def _part(view: EngineView, part: Partition, piece: ParameterRange, *, moving: bool) -> Stepped:
    tensors = _stepped_on(view, part, piece)
    if internals.is_zero3(piece.parameter):  # otherwise the whole parameter has the weights
        weights = part.weight_of(piece)
        tensors = [(WEIGHT if weights is None and key == MASTER else key, tensor) for key, tensor in tensors]
        tensors += [] if weights is None else [(WEIGHT, weights)]
    return _fixed(view.names.name(piece.parameter), tensors, moving=moving)


def _stepped_on(view: EngineView, part: Partition, piece: ParameterRange) -> Tensors:
    """Return master and states of a range of a parameter. Without a master of its own the model computes with it."""
    found = [] if part.replicated and part.weight is None else [(MASTER, _cut(part.master, piece.at, piece))]
    state: Mapping[str, Any] = {} if view.base is None else partitions.states_of(view.base, part)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == part.shape(key) and key not in part.whole:
            found.append((str(key), _cut(value, piece.at, piece)))
    return found


def _cut(tensor: torch.Tensor, at: int, piece: ParameterRange) -> torch.Tensor:
    tensor, size = tensor.detach(), piece.hi - piece.lo
    return tensor if size == tensor.numel() else tensor.reshape(-1).narrow(0, at, size)


def _weights(name: str, parameter: Any, ranks: tuple[int, ...], states: Tensors, stepped_on: bool) -> Iterator[Stepped]:
    if not internals.is_zero3(parameter):
        yield _fixed(name, [(WEIGHT, parameter.detach()), *states], ranks)
        return
    gathered = persistent_parameters.is_gathered(parameter)
    if gathered is not None:
        yield _fixed(name, [(GATHERED, parameter.detach())] if gathered else [], ranks, moving=True)
    if not stepped_on:  # frozen, or another rank has all of it
        yield _fixed(name, [(WEIGHT, partitions.part_of(parameter))])


def _fixed(name: str, tensors: Tensors, ranks: tuple[int, ...] = (), *, moving: bool = False) -> Stepped:
    tensors = sorted(tensors, key=lambda each: each[0])
    return Stepped(name, lambda: tensors, ranks, moving)
