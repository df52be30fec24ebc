"""Notices that a rank evaluates: its model runs in evaluation mode or without gradients, through whichever of its names.

``engine.module(...)`` and ``generate`` do not pass through the engine, and between two batches a rank computes metrics. So the
phase stays until the rank trains again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unickpt.base.module_hooks import ModuleHook


def watch(model: torch.nn.Module, evaluates: Callable[[], None]) -> list[Any]:
    """Call a function before each forward computation of a model that is not part of training. Return the handles of the hooks.

    Args:
        model: the model. The modules that it only wraps are hooked too: ``generate`` of an adapter calls the model inside.
        evaluates: the function.
    """

    def begins(module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the call would break the graph
            return
        if not module.training or not (torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0):
            evaluates()

    return [module.register_forward_pre_hook(ModuleHook(begins)) for module in _wrappers(model)]


def _wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model and the modules inside it that hold most of its parameters."""
    inside: torch.nn.Module | None = model
    total = sum(1 for _ in model.parameters())
    while inside is not None:
        yield inside
        inside = next((child for child in inside.children() if 2 * sum(1 for _ in child.parameters()) > total), None)
