"""Declares the hook that keeps the global batch of a DeepSpeed configuration when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework.declaration import declared
from ds_unickpt.runtime import EngineRuntime
from unickpt.base.logs import logger
from unickpt.base.switch import asks


def _set_batch(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrap the method of ``DeepSpeedConfig`` that computes missing batch sizes. With all three given it does nothing."""
    _keep(runtime, instance)
    return wrapped(*args, **kwargs)


HOOK = declared(
    "deepspeed.batch",
    "deepspeed.runtime.config",
    "DeepSpeedConfig._set_batch_related_parameters",
    partial(_set_batch, RUNTIME),
    why="the batch sizes of a DeepSpeed JSON belong to one number of ranks: on another one the global batch changes, the micro "
    "batch grows, or an assertion fails",
    until="DeepSpeed keeps the global batch of a checkpoint on another number of ranks",
    strict=True,
)


def _keep(runtime: EngineRuntime, config: Any) -> None:
    """Set the batch sizes of a DeepSpeedConfig so that the global batch stays, where the user asked for it.

    Raises:
        ConfigError: this number of ranks cannot make the batch.
    """
    from ds_unickpt.framework.internals import json_of

    if not asks(json_of(config)):
        return
    from ds_unickpt.batch import steered
    from ds_unickpt.batch.batch_plan import Asked, in_place_of, planned
    from ds_unickpt.batch.config import valid_options

    options = valid_options(json_of(config))
    if options is None or not options.enabled or not steered.keeps_batch(options):
        return
    asked = Asked(config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    asked = replace(asked, tolerance=options.batch_tolerance)
    if not all(value is None or type(value) is int for value in (asked.total, asked.per_device, asked.accumulation)):
        return
    runtime.reads_batch |= bool(options.resume_from)
    saved = steered.saved_batch(options.resume_from) if options.resume_from else None
    batch = planned(asked, saved, int(config.world_size))
    if batch is None:
        return
    config.train_batch_size, config.train_micro_batch_size_per_gpu = batch.total, batch.per_device
    config.gradient_accumulation_steps = batch.accumulation
    line = f"the global batch is {batch}{in_place_of(asked, batch)}"
    if batch != saved and line not in runtime.said and not config.global_rank:
        from unickpt.base.logs import make_visible

        make_visible()
        logger.info("unickpt: %s", line)
    runtime.said.add(line)
