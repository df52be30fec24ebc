"""Hooks on the reduction of gradients in DeepSpeed. Installed only if gradient compression is on.

ZeRO 1 and 2 pass a bucket of whole gradients to ``average_tensor``, which cuts it by the ranks that keep each part and calls
``allreduce_bucket`` (runtime/zero/stage_1_and_2.py). Without ZeRO the engine has an ``allreduce_bucket`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE
from ds_unickpt.runtime import EngineRuntime
from unickpt.base.hooks import Hook

_ZERO = "deepspeed.runtime.zero.stage_1_and_2"
_UNTIL = "DeepSpeed has communication hooks, as DistributedDataParallel has"


def _average(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the gradients of a bucket of ZeRO. They are exchanged at its first reduction, on the stream of the reduction."""
    compressed = runtime.compressed.get(instance)
    if compressed is None:
        return wrapped(*args, **kwargs)
    with compressed.bucket_of_zero(*args, **kwargs):
        return wrapped(*args, **kwargs)


def _reduce_zero(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    compressed = runtime.compressed.get(instance)
    if compressed is None or not compressed.exchanged_bucket():
        return wrapped(*args, **kwargs)
    bucket = args[0] if args else kwargs["bucket"]
    return instance.flatten(bucket)  # the mean, cut as the caller wants it


def _reduce(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    compressed = runtime.compressed.get(instance)
    bucket = args[0] if args else kwargs["bucket"]
    if compressed is None or not compressed.exchanged(bucket):
        return wrapped(*args, **kwargs)
    return instance.flatten(bucket)


def _hook(name: str, module: str, attribute: str, wrapper: Callable[..., Any], why: str) -> Hook:
    return declared(
        f"deepspeed.compression.{name}", module, attribute, partial(wrapper, RUNTIME), why=why, until=_UNTIL, strict=True
    )


HOOKS = [
    _hook(
        "bucket",
        _ZERO,
        "DeepSpeedZeroOptimizer.average_tensor",
        _average,
        "allreduce_bucket does not know the parameters of a bucket",
    ),
    _hook(
        "zero",
        _ZERO,
        "DeepSpeedZeroOptimizer.allreduce_bucket",
        _reduce_zero,
        "ZeRO reduces gradients in one dtype, without a hook for another form",
    ),
    _hook(
        "engine",
        ENGINE,
        "DeepSpeedEngine.allreduce_bucket",
        _reduce,
        "without ZeRO, gradients are reduced in one dtype, without a hook for another form",
    ),
]
