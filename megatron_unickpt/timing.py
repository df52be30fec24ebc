"""Timing of a Megatron job's collectives: hooks that tell of steps and phases, installed only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_unickpt import internals
from megatron_unickpt.hooks import _CORE_URL, VERSIONS, version
from unickpt import hooks
from unickpt.hooks import Hook
from unickpt.timing import session
from unickpt.timing.options import TimingOptions
from unickpt.timing.records import Phase

PARALLEL_STATE = "megatron.core.parallel_state"
_SCHEDULES, _OPTIMIZER = "megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_UNTIL = "megatron-core has callbacks for them"

_wanted = TimingOptions()
_stepping = 0  # optimizers whose step goes on: one holds others
_steps = 0


def _in(phase: Phase) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        with session.in_phase(phase):
            return wrapped(*args, **kwargs)

    return wrapper


def _stepped(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    global _stepping, _steps
    _stepping += 1
    try:
        return _in(Phase.OPTIMIZER)(wrapped, instance, args, kwargs)
    finally:
        _stepping -= 1
        if not _stepping:
            _steps += 1
            session.stepped(_steps)


def _hook(module: str, attribute: str, wrapper: Callable[..., Any]) -> Hook:
    path = module.removeprefix("megatron.core.").replace(".", "/")
    return Hook(
        f"megatron.timing.{attribute}", module, attribute, wrapper, VERSIONS, frozenset(),
        "Megatron tells nobody when it goes forward, backward and makes a step", f"{_CORE_URL}/{path}.py", _UNTIL,
    )  # fmt: skip


TIMING = [
    _hook(_SCHEDULES, "forward_step", _in(Phase.FORWARD)),
    _hook(_SCHEDULES, "backward_step", _in(Phase.BACKWARD)),
    _hook(_OPTIMIZER, "MixedPrecisionOptimizer.step", _stepped),
    _hook(_OPTIMIZER, "FP32Optimizer.step", _stepped),
    _hook(_OPTIMIZER, "ChainedOptimizer.step", _stepped),
    _hook(_CHECKPOINTING, "save", _in(Phase.CHECKPOINT)),
    _hook(_CHECKPOINTING, "load", _in(Phase.CHECKPOINT)),
]


def _initialized(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    begin(_wanted)
    return result


START = [_hook(PARALLEL_STATE, "initialize_model_parallel", _initialized)]


def begin_with_groups(options: TimingOptions) -> None:
    """Begin as soon as Megatron has made its process groups: for the training scripts, which know the options before."""
    global _wanted
    _wanted = options
    hooks.install(START, framework="Megatron", version=version())


def begin(options: TimingOptions) -> None:
    """Time this process's collectives from here on. Megatron's process groups are there. Never raises."""
    if options.enabled and session.start(options, internals.process_groups) is not None:
        hooks.install(TIMING, framework="Megatron", version=version())
