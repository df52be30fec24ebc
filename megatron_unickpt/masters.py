"""Masters after a load of weights without their optimizer.

An optimizer steps on its masters, and then writes them over the weights. Megatron's ``reload_model_params`` copies the weights
into the masters, but not into those of a precision-aware optimizer, nor into fp32 copies in host memory. A caller that loads
the weights alone does not pass the optimizer, so it is looked for among the objects of this process.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_unickpt import capture, internals, optimizer_forms, sharded_tensors
from megatron_unickpt import optimizer_internals as optimizers

logger = logging.getLogger("unickpt")


def parameters_alone(state: Any) -> list[torch.nn.Parameter]:
    """Return the live parameters in a sharded state dict that has no state of an optimizer. A load fills them in place."""
    if capture.optimizer_parts(state) or optimizer_forms.has_megatrons(state):
        return []
    leaves = [leaf for leaf in sharded_tensors.walk(state) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))]
    return [leaf.data for leaf in leaves if isinstance(leaf.data, torch.nn.Parameter)]


def follow_weights(parameters: Iterable[torch.nn.Parameter], *, unless_equal: bool = False) -> None:
    """Set the masters of parameters to the values of the weights, in every optimizer of this process that holds them.

    Args:
        parameters: of a model whose weights were loaded.
        unless_equal: keep a master whose cast is its weight. It may have been loaded before.
    """
    loaded = {id(parameter): parameter for parameter in parameters}
    if not loaded:
        return
    found: set[int] = set()
    with torch.no_grad():
        for leaf in _leaves():
            for held in leaf.held:
                if id(held.parameter) in loaded:
                    found.add(id(held.parameter))
                    _follow(leaf, held, unless_equal)
    lost = [p for key, p in loaded.items() if key not in found and optimizers.has_master(p)]
    if lost:
        logger.warning(
            "unickpt: an optimizer holds masters of %d of the loaded parameters, and unickpt does not find it. Call its "
            "reload_model_params() before the next step, which otherwise writes the old masters over the loaded weights.",
            len(lost),
        )


def _leaves() -> Iterator[optimizers.Leaf]:
    """Yield the optimizers of this process, each once. Those whose state unickpt cannot store by parameter are left out."""
    for found in gc.get_objects():
        steps = issubclass(type(found), MegatronOptimizer) and not hasattr(found, "chained_optimizers")
        if steps and not optimizers.unsupported_reason(found):
            yield from optimizers.leaves(found, allocate=False)


def _follow(leaf: optimizers.Leaf, held: optimizers.Held, unless_equal: bool) -> None:
    weight: Any = internals.dequantized(held.parameter.detach()).reshape(-1)[held.lo : held.hi]
    main = held.main.detach().view(-1)
    if main.data_ptr() == weight.data_ptr():
        return  # a weight that is its own master
    value = weight.to(device=main.device, dtype=main.dtype)
    if unless_equal:
        value = torch.where(main.to(weight.dtype) == weight.to(main.device), main, value)
    main.copy_(value)
    optimizers.write_back(leaf, held)
