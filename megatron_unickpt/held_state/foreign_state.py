"""Builds Megatron's common state for a checkpoint of another framework, from the counters that both have.

``megatron/training/checkpointing.py`` expects ``args``, ``iteration`` and ``opt_param_scheduler`` in a checkpoint. The
arguments are those of the running job; its model is compared with the checkpoint's tensors, shape by shape, when names are
translated. The learning rate schedule is also the running job's, and continues at the checkpoint's position.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from unickpt.checkpoint.load import lr_progress
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.lr_progress import Progress
from unickpt.checkpoint.load.report import Entry
from unickpt.transform.convert import training_progress
from unickpt.transform.convert.megatron.keys import DIALECT

CHECKPOINT_VERSION = 3.0  # since 3.0, Megatron stores fused queries, keys and values in the order that the dialects expect
_SCRIPTS, _LIBRARY = (
    "opt_param_scheduler",
    "scheduler",
)  # key of the scheduler's state: in the scripts, in megatron_unickpt.save


@dataclass(frozen=True, slots=True)
class Receiver:
    """Objects of the job that loads a checkpoint.

    Attributes:
        arguments: arguments of the training scripts; None without the scripts.
        scheduler: learning rate scheduler; None if there is none, or if it is not to be loaded.
    """

    arguments: argparse.Namespace | None = None
    scheduler: Any = None


def is_foreign(checkpoint: Checkpoint) -> bool:
    """Return whether the tensors have names of another framework."""
    return checkpoint.manifest.writer.dialect != DIALECT


def common_state(checkpoint: Checkpoint, receiver: Receiver) -> tuple[dict[str, Any], list[Entry]]:
    """Return the common state that Megatron would have stored, and entries for the load's report.

    Args:
        checkpoint: checkpoint of another framework, under its own names.
        receiver: objects of this job.
    """
    step, objects = checkpoint.manifest.step, checkpoint.objects().value
    if getattr(receiver.arguments, "finetune", False):
        reason = "--finetune: only weights are loaded, and counters begin at 0"
        stored = [name for name in ("engine", "lr_scheduler") if objects.get(name) is not None]
        return {"iteration": step}, [Entry(name, "object", "left out", reason) for name in ("iteration", *stored)]
    job, schedule = training_progress.of_job(step, objects), training_progress.of_schedule(step, objects)
    notes = [Entry("iteration", "object", "set", f"step {step} of the checkpoint")]
    common: dict[str, Any] = {"iteration": step}
    if receiver.arguments is not None:
        batch = int(receiver.arguments.global_batch_size)
        known, job, schedule = job.samples is not None, job.with_batch(batch), schedule.with_batch(batch)
        how = "samples of the checkpoint" if known else f"not in the checkpoint; assumed {step} steps of {batch} samples"
        notes.append(Entry("consumed_train_samples", "object", "set", f"{job.samples:,}: {how}"))
        notes.append(
            Entry("args", "object", "left out", "the checkpoint has no Megatron arguments; this job's arguments are used")
        )
        text = "no counterpart; floating point operations are counted from 0"
        notes.append(Entry("num_floating_point_operations_so_far", "object", "left out", text))
        common |= {
            "args": _arguments(receiver.arguments, job),
            "checkpoint_version": CHECKPOINT_VERSION,
            "num_floating_point_operations_so_far": 0,
        }
    if receiver.scheduler is not None:
        state, note = _schedule(receiver.scheduler, schedule)
        common[_LIBRARY if receiver.arguments is None else _SCRIPTS] = state
        notes.append(note)
    if "engine" in objects:
        notes.append(Entry("engine", "object", "set", "as iteration and consumed_train_samples"))
    if objects.get("lr_scheduler") is not None:
        text = "its position is in opt_param_scheduler. The schedule follows this job's arguments"
        notes.append(Entry("lr_scheduler", "object", "left out", text if receiver.scheduler is not None else "not requested"))
    return common, notes


def _arguments(own: argparse.Namespace, job: Progress) -> argparse.Namespace:
    """Return this job's arguments with the counters of the checkpoint."""
    counters = {"consumed_train_samples": job.samples, "skipped_train_samples": 0, "consumed_valid_samples": 0}
    return argparse.Namespace(**{**vars(own), **counters, "no_save_optim": False, "no_save_rng": False})


def _schedule(scheduler: Any, schedule: Progress) -> tuple[dict[str, Any], Entry]:
    kind, own = type(scheduler).__name__, dict(scheduler.state_dict())
    meaning = training_progress.SCHEDULERS.get(kind)
    moved = lr_progress.state_at(meaning, own, schedule)
    if meaning is None or moved is None:
        reason = "the checkpoint has no count of samples" if meaning else f"the counter of {kind} is not known"
        return own, Entry("opt_param_scheduler", "object", "left out", f"{reason}; the scheduler keeps its own state")
    count = f"{schedule.samples:,} samples" if meaning.unit == "samples" else f"{schedule.steps:,} steps"
    return moved, Entry("opt_param_scheduler", "object", "set", f"at {count} of this job's schedule")
