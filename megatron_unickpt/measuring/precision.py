"""Layers of a Megatron job that compute in a dtype of their own, by a plan (``--unickpt-precision``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_unickpt.framework.declaration import declared
from megatron_unickpt.framework.versions import version
from megatron_unickpt.measuring.timed_layers import layers_of
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.training.precision.apply import apply_policy, log
from unickpt.training.precision.policy import Policy, read_policy


def apply_precision(chunks: Iterable[torch.nn.Module], path: str) -> None:
    """Let the layers of a plan compute in its dtype, if this rank is one of its ranks.

    The model keeps its weights: checkpoints are the same with and without a plan. A plan that this job cannot have is a
    warning, and the layers compute as they would without. Megatron's training scripts call this function for
    ``--unickpt-precision``.

    Args:
        chunks: the model of this rank, one module for each pipeline chunk.
        path: file of ``unickpt plan precision``.

    Raises:
        ConfigError: the file cannot be read, or is no plan.
    """
    policy = read_policy(path)
    for chunk in chunks:
        _apply(policy, chunk, path)


def _apply(policy: Policy, chunk: torch.nn.Module, path: str) -> None:
    from megatron_unickpt.framework.internals import (
        groups_within_layers,  # this module is imported before megatron-core is complete
    )

    layers = {each.name: each.module for each in layers_of(chunk)}
    rank, world = dist.get_rank(), dist.get_world_size()
    applied = apply_policy(
        policy, layers, path, rank=rank, world=world, all_layers=False, knows_autocast=False, together=groups_within_layers()
    )
    log(applied, rank)


def forward_hook(path: str) -> Hook:
    """Return the hook that applies a plan to each chunk of the model before its first forward pass.

    Raises:
        ConfigError: the file cannot be read, or is no plan.
    """
    policy = read_policy(path) if path else Policy()
    known: WeakSet[torch.nn.Module] = WeakSet()

    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        chunk = kwargs.get("model", args[2] if len(args) > 2 else None)
        if isinstance(chunk, torch.nn.Module) and chunk not in known:
            known.add(chunk)
            _apply(policy, chunk, path)
        return wrapped(*args, **kwargs)

    return declared(
        "megatron.precision.forward_step",
        "megatron.core.pipeline_parallel.schedules",
        "forward_step",
        wrapper,
        why="the training scripts have no callback after the model is made",
        until="megatron-core has such a callback",
    )


OPTIONAL = [forward_hook("")]  # for the table of hooks


def begin(path: str) -> None:
    """Apply a plan to the model that a training script makes. Called after the arguments are parsed."""
    hooks.install([forward_hook(path)], framework="Megatron", version=version())
