"""Timing of a DeepSpeed job's collectives: hooks that tell of steps and phases, installed only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_unickpt import internals
from ds_unickpt.hooks import ENGINE, VERSIONS
from unickpt import hooks
from unickpt.hooks import Hook
from unickpt.timing import session
from unickpt.timing.options import TimingOptions
from unickpt.timing.records import Phase

_WHY = "DeepSpeed tells nobody when it goes forward, backward and makes a step"
_UNTIL = "DeepSpeed has callbacks for them"
_UPSTREAM = "https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py"


def _in(phase: Phase) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        with session.in_phase(Phase.EVALUATION if phase is Phase.FORWARD and not instance.training else phase):
            return wrapped(*args, **kwargs)

    return wrapper


def _stepped(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = _in(Phase.OPTIMIZER)(wrapped, instance, args, kwargs)
    session.stepped(int(instance.global_steps))
    return result


def _hook(name: str, method: str, wrapper: Callable[..., Any]) -> Hook:
    return Hook(
        f"deepspeed.timing.{name}", ENGINE, f"DeepSpeedEngine.{method}", wrapper, VERSIONS, frozenset(), _WHY, _UPSTREAM, _UNTIL
    )


TIMING = [
    _hook("forward", "forward", _in(Phase.FORWARD)),
    _hook("backward", "backward", _in(Phase.BACKWARD)),
    _hook("step", "_take_model_step", _stepped),
    _hook("save", "save_checkpoint", _in(Phase.CHECKPOINT)),
    _hook("load", "load_checkpoint", _in(Phase.CHECKPOINT)),
]


def begin(engine: Any, options: TimingOptions) -> None:
    """Time this process's collectives from here on. Never raises."""
    if session.start(options, lambda: internals.process_groups(engine)) is None:
        return
    from deepspeed.git_version_info import version

    hooks.install(TIMING, framework="DeepSpeed", version=version)
