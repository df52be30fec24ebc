"""Timing of the collectives of a DeepSpeed job: hooks that report steps and phases. Installed only if timing is enabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework import internals
from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE, version
from ds_unickpt.measuring.timed_layers import layers_of
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.diagnosis.recording.records import Phase


def _in(phase: Phase) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if phase is Phase.FORWARD and not (instance.training and torch.is_grad_enabled()):
            session.evaluates()
            return wrapped(*args, **kwargs)
        with session.in_phase(phase):
            return wrapped(*args, **kwargs)

    return wrapper


def _stepped(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = _in(Phase.OPTIMIZER)(wrapped, instance, args, kwargs)
    session.stepped(int(instance.global_steps))
    choosing = RUNTIME.choosing.get(instance)
    if choosing is not None:
        choosing.stepped(instance)
    return result


def _hook(name: str, method: str, wrapper: Callable[..., Any], why: str) -> Hook:
    """Return a hook that passes every call through with its arguments and result, also on an unknown source."""
    return declared(
        f"deepspeed.timing.{name}", ENGINE, f"DeepSpeedEngine.{method}", wrapper, why=why, strict=False,
        until="DeepSpeed has callbacks for the phases of a step",
    )  # fmt: skip


def all_timing_hooks() -> list[Hook]:
    """Return every hook that timing may install: those that report steps and phases."""
    return [
        _hook("forward", "forward", _in(Phase.FORWARD), "no callback at the start and end of a forward pass"),
        _hook("backward", "backward", _in(Phase.BACKWARD), "no callback at the start and end of a backward pass"),
        _hook("step", "_take_model_step", _stepped, "no callback at the start and end of an optimizer step"),
        _hook("save", "save_checkpoint", _in(Phase.CHECKPOINT), "the collectives of a save do not belong to a training step"),
        _hook("load", "load_checkpoint", _in(Phase.CHECKPOINT), "the collectives of a load do not belong to a training step"),
    ]


def begin(engine: Any, options: TimingOptions) -> None:
    """Start timing the collectives of this process. Never raises."""
    if session.start(options, lambda: internals.process_groups(engine)) is None:
        return
    session.watch_evaluation(engine.module)
    session.time_layers(engine.module, lambda: layers_of(engine.module))
    hooks.install(all_timing_hooks(), framework="DeepSpeed", version=version(), lost="no times of forward, backward and step")
