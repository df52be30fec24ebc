"""The training progress that a checkpoint of any framework stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.checkpoint.load.lr_progress import CountedProgress, Progress
from unickpt.transform.convert.deepspeed import lr_schedulers as deepspeed
from unickpt.transform.convert.megatron import lr_schedulers as megatron

SCHEDULERS: Mapping[str, CountedProgress] = {**deepspeed.SCHEDULERS, **megatron.SCHEDULERS}  # by class name


def of_job(step: int, objects: Mapping[str, Any]) -> Progress:
    """Return the progress of the job that saved a checkpoint.

    Args:
        step: step of the manifest.
        objects: decoded non-tensor state: ``engine`` of a DeepSpeed job, ``common`` of a Megatron job.
    """
    engine, common = objects.get("engine"), objects.get("common")
    samples = None
    if isinstance(engine, Mapping):
        samples = deepspeed.samples_of_job(engine)
    elif isinstance(common, Mapping):
        samples = megatron.samples_of_job(common)
    return Progress(step, None if not samples and step else samples)  # 0 after the first step: the job did not count


def of_schedule(step: int, objects: Mapping[str, Any]) -> Progress:
    """Return the progress of the learning-rate schedule of the job that saved a checkpoint.

    Args:
        step: step of the manifest.
        objects: as for ``of_job``.
    """
    job, common = of_job(step, objects), objects.get("common")
    if isinstance(common, Mapping):
        return megatron.schedule_of_job(common, job)
    return deepspeed.schedule_of_job(objects, job)
