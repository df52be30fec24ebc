"""The training progress that a checkpoint of any framework stores, in its objects and in the state of its scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unickpt.checkpoint.load.lr_progress import LAMBDA_LR, CountedProgress, Progress, count_of, counted, state_at

# deepspeed/runtime/lr_schedules.py: ``step`` is called once per optimizer step; the first call changes -1 to 0
_DEEPSPEED = CountedProgress("steps", "last_batch_iteration", -1)
# megatron/core/optimizer_param_scheduler.py: ``step(increment)`` with the samples of an iteration
_MEGATRON = CountedProgress("samples", "num_steps", 0)

# by class name
DEEPSPEED_SCHEDULERS: Mapping[str, CountedProgress] = {
    **dict.fromkeys(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"), _DEEPSPEED),
    "LambdaLR": LAMBDA_LR,
}
SCHEDULERS: Mapping[str, CountedProgress] = {**DEEPSPEED_SCHEDULERS, "OptimizerParamScheduler": _MEGATRON}


def move(scheduler: Any, progress: Progress) -> bool:
    """Move a scheduler of this job to the progress of another framework's schedule, and return whether it can be moved.

    The state is set to one step less. The last step is taken, so that the scheduler sets the learning rates.
    """
    before = dataclasses.replace(progress, steps=progress.steps - 1)
    state = state_at(DEEPSPEED_SCHEDULERS.get(type(scheduler).__name__), scheduler.state_dict(), before)
    if state is None:
        return False
    scheduler.load_state_dict(state)
    scheduler.step()
    return True


def of_job(step: int, objects: Mapping[str, Any]) -> Progress:
    """Return the progress of the job that saved a checkpoint.

    Args:
        step: step of the manifest.
        objects: decoded non-tensor state: ``engine`` of a DeepSpeed job, ``common`` of a Megatron job.
    """
    engine, common = objects.get("engine"), objects.get("common")
    samples = None
    if isinstance(engine, Mapping):
        samples = count_of(engine.get("global_samples"))
    elif isinstance(common, Mapping):
        samples = _samples_of_megatron(common)
    return Progress(step, None if not samples and step else samples)  # 0 after the first step: the job did not count


def of_schedule(step: int, objects: Mapping[str, Any]) -> Progress:
    """Return the progress of the learning-rate schedule of the job that saved a checkpoint.

    Args:
        step: step of the manifest.
        objects: as for ``of_job``; ``lr_scheduler`` of a DeepSpeed job.
    """
    job, common = of_job(step, objects), objects.get("common")
    if isinstance(common, Mapping):
        return counted(_MEGATRON, _megatron_scheduler(common), job) or job
    return _schedule_of_deepspeed(objects, job)


def _schedule_of_deepspeed(objects: Mapping[str, Any], job: Progress) -> Progress:
    """Return the progress of the job's schedule. Skipped steps do not count."""
    saved, engine = objects.get("lr_scheduler"), objects.get("engine")
    if isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping):
        found = counted(DEEPSPEED_SCHEDULERS.get(str(saved.get("class"))), saved["state"], job)
        if found is not None:
            return found
    skipped = count_of(engine.get("skipped_steps")) if isinstance(engine, Mapping) else None
    return job.up_to(max(job.steps - skipped, 0)) if skipped else job


def _samples_of_megatron(common: Mapping[str, Any]) -> int | None:
    """Return the samples that a job was trained on; None if it has no such counter.

    Jobs that use megatron-core without the training scripts have no arguments; their scheduler counts the samples.
    """
    samples = count_of(getattr(common.get("args"), "consumed_train_samples", None))
    return count_of(_megatron_scheduler(common).get("num_steps")) if samples is None else samples


def _megatron_scheduler(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scheduler state: ``opt_param_scheduler`` of the scripts, or ``scheduler`` of ``megatron_unickpt.save``."""
    found = common.get("opt_param_scheduler", common.get("scheduler"))
    return found if isinstance(found, Mapping) and "lr_decay_style" in found else {}
