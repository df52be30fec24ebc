"""Masters after a load of weights without their optimizer.

An optimizer steps on its masters, and then writes them over the weights. Megatron's ``reload_model_params`` copies the weights
into the masters, but not into those of a precision-aware optimizer, nor into fp32 copies in host memory. A caller that loads
the weights alone does not pass the optimizer, so it is looked for among the objects of this process.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_unickpt.dist_checkpointing import capture
from megatron_unickpt.framework import internals
from megatron_unickpt.framework import optimizer_internals as optimizers
from megatron_unickpt.held_state import optimizer_forms
from unickpt.base.logs import logger


@dataclass(frozen=True, slots=True)
class Alone:
    """A parameter that is loaded without its optimizer.

    Attributes:
        parameter: of the live model.
        path: keys of its place in the state dict, which has the loaded values after the load. They may be a copy, such as the
            transposed weights of ``GroupedMLP``: the parameter has them only after the caller's ``load_state_dict``.
        quantized: the parameter is in fp8, so its master cannot be compared with the loaded values.
    """

    parameter: torch.nn.Parameter
    path: tuple[Any, ...]
    quantized: bool = False


def parameters_alone(state: Any) -> list[Alone]:
    """Return the live parameters in a sharded state dict that has no state of an optimizer. Call it before the load."""
    if capture.optimizer_parts(state) or optimizer_forms.has_megatrons(state):
        return []
    return [
        Alone(leaf.data, path, internals.dequantized(leaf.data) is not leaf.data)
        for path, leaf in _paths(state)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and isinstance(leaf.data, torch.nn.Parameter)
    ]


def follow_loaded(alone: Iterable[Alone], loaded: Any) -> None:
    """Set the masters of parameters to the values that a load has returned.

    A master whose cast is the loaded weight stays: it may have been loaded before.
    """
    values: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
    left: list[torch.nn.Parameter] = []
    for each in alone:
        value = _at(loaded, each.path)
        if isinstance(value, torch.Tensor):
            if each.quantized or value.shape != each.parameter.shape:
                left.append(each.parameter)
            else:
                values[id(each.parameter)] = each.parameter, value
    _follow_all(values, unless_equal=True)
    if any(map(optimizers.has_master, left)):
        logger.warning(
            "unickpt: the masters of %d of the loaded parameters (fp8) are not set. Unless the optimizer is loaded too, call "
            "its reload_model_params() after the load_state_dict of the model: the next step otherwise writes the old masters "
            "over the loaded weights.",
            sum(map(optimizers.has_master, left)),
        )


def follow_weights(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set the masters of the parameters of a model to its weights, in every optimizer of this process that holds them."""
    _follow_all({id(parameter): (parameter, parameter) for parameter in parameters}, unless_equal=False)


def _follow_all(values: Mapping[int, tuple[torch.nn.Parameter, torch.Tensor]], *, unless_equal: bool) -> None:
    """Set masters.

    Args:
        values: parameter and the value that its master gets, by the id of the parameter.
        unless_equal: keep a master whose cast is the value.
    """
    if not values:
        return
    found: set[int] = set()
    with torch.no_grad():
        for leaf in _leaves(values.keys()):
            for held in leaf.held:
                found.add(id(held.parameter))
                _follow(leaf, held, values[id(held.parameter)][1], unless_equal)
    lost = [p for key, (p, _) in values.items() if key not in found and optimizers.has_master(p)]
    if lost:
        logger.warning(
            "unickpt: an optimizer holds masters of %d of the loaded parameters, and unickpt does not find it. Call its "
            "reload_model_params() before the next step, which otherwise writes the old masters over the loaded weights.",
            len(lost),
        )


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every leaf of nested dicts and lists with the keys of its place."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths(value, (*path, key))
    else:
        yield path, tree


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a place; None if there is nothing."""
    for key in path:
        if not isinstance(tree, (dict, list)) or (key not in tree if isinstance(tree, dict) else key >= len(tree)):
            return None
        tree = tree[key]
    return tree


def _leaves(wanted: Collection[int]) -> Iterator[optimizers.Leaf]:
    """Yield what the optimizers of this process hold of the wanted parameters: masters without states.

    Optimizers whose state unickpt cannot store by parameter are left out.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if MegatronOptimizer in kind.__mro__}
    for found in [each for each in objects if type(each) in kinds and not hasattr(each, "chained_optimizers")]:
        if not optimizers.unsupported_reason(found):
            yield from optimizers.leaves(found, allocate=False, masters_of=wanted)


def _follow(leaf: optimizers.Leaf, held: optimizers.HeldRange, whole: torch.Tensor, unless_equal: bool) -> None:
    def part(data: torch.Tensor) -> Any:
        found = internals.dequantized(data.detach())
        return found if found.shape == held.main.shape else found.reshape(-1)[held.lo : held.hi].view(held.main.shape)

    main, own = held.main.detach(), part(held.parameter)
    if main.data_ptr() == own.data_ptr():
        return  # a weight that is its own master
    weight = part(whole)
    value = weight.to(device=main.device, dtype=main.dtype)
    if unless_equal:
        value = torch.where(main.to(weight.dtype) == weight.to(main.device), main, value)
    main.copy_(value)
    optimizers.write_back(leaf, held)
