"""Hooks by which a witness sees steps of optimizers, and the model of training scripts. Installed only if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework.declaration import declared
from megatron_unickpt.framework.versions import FRAMEWORK, version
from megatron_unickpt.runtime import AskedWitness, Runtime
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.training.witness.settings import Settings

_SCHEDULES, _OPTIMIZER = "megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer"


def _stepped(runtime: Runtime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``step``. A chained optimizer comes first, and its inner optimizers, which have no witness, within its step."""
    asked = runtime.asked_witness
    if asked is not None and asked.chunks:
        runtime.asked_witness = None
        from megatron_unickpt.framework import internals
        from megatron_unickpt.witnessing import watch

        watch.begin(runtime, asked.chunks, instance, asked.settings, internals.iterations_done() or 0, asked.folders())
    own = runtime.replays.get(instance) or runtime.witnesses.get(instance)
    if own is None:
        return wrapped(*args, **kwargs)
    own.before()
    result = wrapped(*args, **kwargs)
    own.after(result)
    return result


def _forward(runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``forward_step``, whose third argument is a chunk of the model."""
    asked, chunk = runtime.asked_witness, kwargs.get("model", args[2] if len(args) > 2 else None)
    if asked is not None and isinstance(chunk, torch.nn.Module) and all(chunk is not each for each in asked.chunks):
        asked.chunks.append(chunk)
    return wrapped(*args, **kwargs)


def _hook(module: str, attribute: str, wrapper: Callable[..., Any], why: str) -> Hook:
    until = "megatron-core has callbacks for steps and phases"
    return declared(f"megatron.witness.{attribute}", module, attribute, partial(wrapper, RUNTIME), why=why, until=until)


HOOKS = [
    _hook(
        _OPTIMIZER,
        "MixedPrecisionOptimizer.step",
        _stepped,
        "no callback before and after a step in bf16 or fp16",
    ),
    _hook(_OPTIMIZER, "FP32Optimizer.step", _stepped, "no callback before and after a step in fp32"),
    _hook(_OPTIMIZER, "ChainedOptimizer.step", _stepped, "its inner optimizers have no witness of their own"),
]
MODEL = _hook(_SCHEDULES, "forward_step", _forward, "no callback that passes the model of a training script")


def begin_with_scripts(settings: Settings, folders: Callable[[], Sequence[str]]) -> None:
    """Watch the model that a training script makes, from its first step on. Called after the arguments are parsed.

    ``folders``: returns those into which it saves.
    """
    RUNTIME.asked_witness = AskedWitness(settings, folders)
    hooks.install([*HOOKS, MODEL], framework=FRAMEWORK, version=version(), lost="no witness")
