"""Hooks by which the witness of an engine sees steps and loads. Installed only if an engine has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE
from ds_unickpt.runtime import EngineRuntime
from unickpt.base.hooks import Hook


def _stepped(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    own = runtime.replays.get(instance) or runtime.witnesses.get(instance)
    if own is None:
        return wrapped(*args, **kwargs)
    own.before(instance)
    result = wrapped(*args, **kwargs)
    own.after(instance)
    return result


def _load(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    own = runtime.witnesses.get(instance)
    if own is not None:
        own.forget()
    return wrapped(*args, **kwargs)


def _hook(name: str, method: str, wrapper: Callable[..., Any], why: str) -> Hook:
    return declared(
        f"deepspeed.witness.{name}", ENGINE, f"DeepSpeedEngine.{method}", partial(wrapper, RUNTIME), why=why, strict=False,
        until="DeepSpeed has callbacks for the phases of a step",
    )  # fmt: skip


HOOKS = [
    _hook("step", "_take_model_step", _stepped, "no callback before and after a step, when weights and masters are complete"),
    _hook("load", "load_checkpoint", _load, "a load writes weights and states through .data"),
]
