"""What the hooks on Megatron's optimizers do: our description of their state where it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_unickpt import internals, optimizer
from megatron_unickpt.optimizer import MARK, PART, TENSORS, OptimizerPart

logger = logging.getLogger("unickpt")

# Set by the training scripts' hooks for versions that pass no metadata (0.12).
asked_for_by_scripts = False
_warned: set[str] = set()


def sharded_state_dict(
    wrapped: Callable[..., Any], instance: Any, model_sharded_state_dict: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """``optimizer.sharded_state_dict``; native unless ``metadata`` has our mark."""
    metadata = kwargs.get("metadata") or {}
    if not (metadata.get(MARK) or asked_for_by_scripts):
        return wrapped(model_sharded_state_dict, *args, **kwargs)
    reason = internals.unsupported_reason(instance)
    if reason:
        if reason not in _warned:
            _warned.add(reason)
            logger.warning(
                "unickpt: not supported yet: %s. Its state is stored as Megatron describes it, and loads only where that does.",
                reason,
            )
        return wrapped(model_sharded_state_dict, *args, **kwargs)
    is_loading = bool(args[0]) if args else bool(kwargs.get("is_loading", False))
    return optimizer.sharded_state_dict(instance, model_sharded_state_dict, is_loading=is_loading)


def load_state_dict(wrapped: Callable[..., Any], _instance: Any, state_dict: Any) -> Any:
    """``optimizer.load_state_dict``; native unless the state dict is ours."""
    part = state_dict.get(PART) if isinstance(state_dict, dict) else None
    if not isinstance(part, OptimizerPart):
        return wrapped(state_dict)
    optimizer.load_state_dict(part)
    state_dict.pop(TENSORS, None)
    return None
