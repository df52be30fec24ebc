"""Megatron's common state of a checkpoint that another framework has written: made of counters that mean the same in both.

``megatron/training/checkpointing.py`` wants ``args``, ``iteration`` and ``opt_param_scheduler`` from a checkpoint. Arguments
are this job's own: what they say of the model is compared with the checkpoint's tensors, shape by shape, when it is translated.
The schedule is this job's own, too, and goes on where the checkpoint's was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unickpt import schedules
from unickpt.loading import Checkpoint
from unickpt.report import Entry
from unickpt.schedules import Progress

DIALECT = "megatron-core"
CHECKPOINT_VERSION = 3.0  # since then Megatron's fused queries, keys and values are in the order of dialects
_SCRIPTS, _LIBRARY = "opt_param_scheduler", "scheduler"  # where a scheduler's state is, by who loads


@dataclass(frozen=True, slots=True)
class Job:
    """Who loads.

    Attributes:
        arguments: of the training scripts; None: there are none.
        scheduler: of learning rates; None: there is none, or it shall not be loaded.
    """

    arguments: argparse.Namespace | None = None
    scheduler: Any = None


_job = Job()


@contextmanager
def into(job: Job) -> Iterator[None]:
    """Checkpoints of other frameworks that are loaded in this block get the common state that this job needs."""
    global _job
    before, _job = _job, job
    try:
        yield
    finally:
        _job = before


def is_foreign(checkpoint: Checkpoint) -> bool:
    """Whether its tensors have names of another framework."""
    return checkpoint.manifest.writer.dialect != DIALECT


def common_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[Entry]]:
    """What Megatron would have stored with such a checkpoint, and what to say about it.

    Args:
        checkpoint: of another framework, as it is stored.
    """
    step, objects = checkpoint.manifest.step, checkpoint.objects().value
    if getattr(_job.arguments, "finetune", False):
        reason = "--finetune: weights alone are loaded, and counters begin at 0"
        stored = [name for name in ("engine", "lr_scheduler") if objects.get(name) is not None]
        return {"iteration": step}, [Entry(name, "object", "left out", reason) for name in ("iteration", *stored)]
    job, schedule = schedules.of_job(step, objects), schedules.of_schedule(step, objects)
    notes = [Entry("iteration", "object", "set", f"step {step} of the checkpoint")]
    common: dict[str, Any] = {"iteration": step}
    if _job.arguments is not None:
        batch = int(_job.arguments.global_batch_size)
        known, job, schedule = job.samples is not None, job.with_batch(batch), schedule.with_batch(batch)
        how = "samples of the checkpoint" if known else f"the checkpoint does not tell: {step} steps of {batch} samples"
        notes.append(Entry("consumed_train_samples", "object", "set", f"{job.samples:,}: {how}"))
        notes.append(Entry("args", "object", "left out", "Megatron's arguments are not in it: this job's own are used"))
        text = "no counterpart: floating point operations are counted from here"
        notes.append(Entry("num_floating_point_operations_so_far", "object", "left out", text))
        common |= {
            "args": _arguments(_job.arguments, job),
            "checkpoint_version": CHECKPOINT_VERSION,
            "num_floating_point_operations_so_far": 0,
        }
    if _job.scheduler is not None:
        state, note = _schedule(_job.scheduler, schedule)
        common[_LIBRARY if _job.arguments is None else _SCRIPTS] = state
        notes.append(note)
    if "engine" in objects:
        notes.append(Entry("engine", "object", "set", "as iteration and consumed_train_samples"))
    if objects.get("lr_scheduler") is not None:
        text = "what it counted is in opt_param_scheduler; its form is this job's own, by its arguments"
        notes.append(Entry("lr_scheduler", "object", "left out", text if _job.scheduler is not None else "not asked for"))
    return common, notes


def _arguments(own: argparse.Namespace, job: Progress) -> argparse.Namespace:
    """This job's arguments with the counters of the checkpoint, which holds an optimizer if it is asked for one."""
    counters = {"consumed_train_samples": job.samples, "skipped_train_samples": 0, "consumed_valid_samples": 0}
    return argparse.Namespace(**{**vars(own), **counters, "no_save_optim": False, "no_save_rng": False})


def _schedule(scheduler: Any, schedule: Progress) -> tuple[dict[str, Any], Entry]:
    kind, own = type(scheduler).__name__, dict(scheduler.state_dict())
    moved = schedules.state_at(kind, own, schedule)
    if moved is None:
        reason = f"it is not known what {kind} counts" if kind not in schedules.SCHEDULERS else "nobody has counted samples"
        return own, Entry("opt_param_scheduler", "object", "left out", f"{reason}: it keeps its own state")
    count = f"{schedule.samples:,} samples" if schedules.SCHEDULERS[kind].unit == "samples" else f"{schedule.steps:,} steps"
    return moved, Entry("opt_param_scheduler", "object", "set", f"{count} of this job's own schedule are over")
