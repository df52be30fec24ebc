"""Timing of the collectives of a Megatron job: hooks that report steps and phases. Installed only if timing is enabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_unickpt.framework.declaration import declared
from megatron_unickpt.framework.internals import iterations_done, process_groups
from megatron_unickpt.framework.versions import version
from megatron_unickpt.measuring.timed_layers import layers_of
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.diagnosis.recording.records import Phase

_PARALLEL_STATE = "megatron.core.parallel_state"
_SCHEDULES, _OPTIMIZER = "megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"


class StepCounter:
    """Counts optimizer steps. A chained optimizer steps its inner optimizers within one step.

    With Megatron's training scripts a step has the number of its iteration. Other programs count from the iteration that
    ``resume_or_start`` has loaded. Both go on after a restart.
    """

    def __init__(self) -> None:
        self._depth = 0

    def wrapper(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        """Wrap an optimizer's ``step``."""
        self._depth += 1
        try:
            return _in(Phase.OPTIMIZER)(wrapped, instance, args, kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                done = iterations_done()
                if done is None:
                    session.stepped_on()
                else:
                    session.stepped(done + 1)


def _in(phase: Phase) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        with session.in_phase(phase):
            return wrapped(*args, **kwargs)

    return wrapper


def _forward(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``forward_step``, whose third argument is a chunk of the model."""
    chunk = kwargs.get("model", args[2] if len(args) > 2 else None)
    session.watch_evaluation(chunk)
    session.time_layers(chunk, lambda: layers_of(chunk))
    if not torch.is_grad_enabled():
        session.evaluates()
        return wrapped(*args, **kwargs)
    return _in(Phase.FORWARD)(wrapped, instance, args, kwargs)


def _hook(module: str, attribute: str, wrapper: Callable[..., Any], why: str) -> Hook:
    until = "megatron-core has callbacks for steps and phases"
    return declared(f"megatron.timing.{attribute}", module, attribute, wrapper, why=why, until=until)


def timing_hooks() -> list[Hook]:
    """Return the hooks that report steps and phases, with a new step counter."""
    step = StepCounter().wrapper
    return [
        _hook(_SCHEDULES, "forward_step", _forward, "no callback at the beginning and end of a forward pass"),
        _hook(_SCHEDULES, "backward_step", _in(Phase.BACKWARD), "no callback at the beginning and end of a backward pass"),
        _hook(_OPTIMIZER, "MixedPrecisionOptimizer.step", step, "no callback after a step of a bf16 or fp16 optimizer"),
        _hook(_OPTIMIZER, "FP32Optimizer.step", step, "no callback after a step of an fp32 optimizer"),
        _hook(_OPTIMIZER, "ChainedOptimizer.step", step, "its inner optimizers step within one step of training"),
        _hook(_CHECKPOINTING, "save", _in(Phase.CHECKPOINT), "the collectives of a save do not belong to a training step"),
        _hook(_CHECKPOINTING, "load", _in(Phase.CHECKPOINT), "the collectives of a load do not belong to a training step"),
    ]


def groups_hook(options: TimingOptions) -> Hook:
    """Return the hook that starts timing after Megatron has created its process groups."""

    def initialized(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        begin(options)
        return result

    why = "timing needs Megatron's process groups, which are created after the arguments are parsed"
    return _hook(_PARALLEL_STATE, "initialize_model_parallel", initialized, why)


def all_timing_hooks() -> list[Hook]:
    """Return every hook that timing may install, for the table of hooks."""
    return [*timing_hooks(), groups_hook(TimingOptions())]


def begin_with_groups(options: TimingOptions) -> None:
    """Start timing when Megatron creates its process groups. The training scripts parse their options before that.

    The last call counts: what the scripts parse, after what the environment asks for.
    """
    hook = groups_hook(options)
    hooks.uninstall([hook])
    hooks.install([hook], framework="Megatron", version=version())


def begin(options: TimingOptions) -> None:
    """Start timing the collectives of this process. Megatron's process groups must exist. Never raises."""
    if options.enabled and session.start(options, process_groups) is not None:
        hooks.install(timing_hooks(), framework="Megatron", version=version())
