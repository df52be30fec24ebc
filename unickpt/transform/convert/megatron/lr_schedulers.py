"""Megatron's learning-rate scheduler, and the progress in Megatron's common state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.checkpoint.load.lr_progress import CountedProgress, Progress, count_of, counted

# megatron/core/optimizer_param_scheduler.py: ``step(increment)`` with the samples of an iteration
OPTIMIZER_PARAM_SCHEDULER = CountedProgress("samples", "num_steps", 0)
SCHEDULERS: Mapping[str, CountedProgress] = {"OptimizerParamScheduler": OPTIMIZER_PARAM_SCHEDULER}


def samples_of_job(common: Mapping[str, Any]) -> int | None:
    """Return the samples that a job was trained on, by its common state; None if it has no such counter.

    Jobs that use megatron-core without the training scripts have no arguments; their scheduler counts the samples.
    """
    samples = count_of(getattr(common.get("args"), "consumed_train_samples", None))
    return count_of(_scheduler(common).get("num_steps")) if samples is None else samples


def schedule_of_job(common: Mapping[str, Any], job: Progress) -> Progress:
    """Return the progress of the job's schedule.

    Args:
        common: decoded common state of the checkpoint.
        job: progress of the job.
    """
    return counted(OPTIMIZER_PARAM_SCHEDULER, _scheduler(common), job) or job


def _scheduler(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scheduler state: ``opt_param_scheduler`` of the scripts, or ``scheduler`` of ``megatron_unickpt.save``."""
    found = common.get("opt_param_scheduler", common.get("scheduler"))
    return found if isinstance(found, Mapping) and "lr_decay_style" in found else {}
