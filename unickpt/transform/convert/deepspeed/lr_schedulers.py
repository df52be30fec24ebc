"""Learning-rate schedulers of DeepSpeed jobs, and the progress in the objects of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.checkpoint.load.lr_progress import LAMBDA_LR, CountedProgress, Progress, count_of, counted

# deepspeed/runtime/lr_schedules.py: ``step`` is called once per optimizer step; the first call changes -1 to 0
_COUNTER = CountedProgress("steps", "last_batch_iteration", -1)
SCHEDULERS: Mapping[str, CountedProgress] = {
    **dict.fromkeys(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"), _COUNTER),
    "LambdaLR": LAMBDA_LR,
}


def samples_of_job(engine: Mapping[str, Any]) -> int | None:
    """Return the samples that a job was trained on, by its ``engine`` object; None if it has no such counter."""
    return count_of(engine.get("global_samples"))


def schedule_of_job(objects: Mapping[str, Any], job: Progress) -> Progress:
    """Return the progress of the job's schedule. Skipped steps do not count.

    Args:
        objects: decoded non-tensor state of the checkpoint: ``engine`` and ``lr_scheduler`` (``ds_unickpt.saving.capture``).
        job: progress of the job.
    """
    saved, engine = objects.get("lr_scheduler"), objects.get("engine")
    if isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping):
        found = counted(SCHEDULERS.get(str(saved.get("class"))), saved["state"], job)
        if found is not None:
            return found
    skipped = count_of(engine.get("skipped_steps")) if isinstance(engine, Mapping) else None
    return job.up_to(max(job.steps - skipped, 0)) if skipped else job
