"""What Trainer does when torchrun starts its job again: the same global batch, and a resume that no argument names.

Trainer counts optimizer steps. With the same global batch a step has the same samples on any number of ranks, so epochs,
position in the data, learning rate and total steps stay what they were.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from ds_unickpt.batch import steered
from ds_unickpt.batch.batch_plan import Asked, in_place_of, planned
from ds_unickpt.batch.batches import Batch
from ds_unickpt.batch.config import valid_options
from ds_unickpt.loops import trainer_folders
from ds_unickpt.loops.trainer_folders import ResumeFolder
from unickpt.base.logs import logger, make_visible
from unickpt.base.options.job import Options

_TOTAL, _ACCUMULATION = "train_batch_size", "gradient_accumulation_steps"


def keep_batch(config: MutableMapping[str, Any], arguments: Any) -> bool:
    """Scale the gradient accumulation so that the global batch of the checkpoint stays, where the user asked for it.

    Args:
        config: DeepSpeed configuration, before Trainer fills in its ``"auto"`` values. An accumulation in it is replaced.
        arguments: TrainingArguments. Their ``gradient_accumulation_steps`` is replaced.

    Returns:
        Whether the user asked for it. It is the same on all ranks.

    Raises:
        ConfigError: this number of ranks cannot make the batch.
        UnickptError: a checkpoint cannot be read for a reason that is no damage.
    """
    options = options_of(config)
    if options is None or not steered.keeps_batch(options) or int(config.get("sequence_parallel_size") or 1) > 1:
        return False
    saved = _saved_batch(arguments)
    if saved is None:
        return True
    total = config.get(_TOTAL)
    given = total if type(total) is int else None
    asked = Asked(given, int(arguments.per_device_train_batch_size), tolerance=options.batch_tolerance)
    batch = planned(asked, saved, _ranks(arguments))
    if batch is None or batch.accumulation == arguments.gradient_accumulation_steps:
        return True
    if os.environ.get("RANK", str(arguments.process_index)) == "0":
        make_visible()
        before = arguments.gradient_accumulation_steps
        logger.info(
            "unickpt: gradient_accumulation_steps %s -> %s: the global batch is %s%s", before, batch.accumulation, batch,
            in_place_of(asked, batch),
        )  # fmt: skip
    arguments.gradient_accumulation_steps = batch.accumulation
    if type(config.get(_ACCUMULATION)) is int:
        config[_ACCUMULATION] = batch.accumulation
    if given is not None:
        config[_TOTAL] = batch.total
    return True


def _ranks(arguments: Any) -> int:
    """Return the number of ranks. Without GPU and ``use_cpu``, TrainingArguments know of one until DeepSpeed has begun."""
    return max(int(arguments.world_size), int(os.environ.get("WORLD_SIZE", 1)))


def options_of(config: Any) -> Options | None:
    """Return the options of a valid configuration that enables unickpt; None for any other."""
    options = valid_options(config)
    return options if options is not None and options.enabled else None


def resumes(options: Options) -> bool:
    """Whether ``Trainer.train`` resumes although no argument names a checkpoint."""
    return options.auto_resume == "always" or (options.auto_resume == "steering" and steered.in_later_round())


def newest(output_dir: str, *, fall_back: bool) -> ResumeFolder:
    """Return the folder that a run resumes from; None in it if there is none.

    Raises:
        CorruptCheckpointError: all committed checkpoints are damaged.
    """
    if not os.path.isdir(output_dir):
        return ResumeFolder(None)
    chosen = trainer_folders.choose(output_dir)
    if chosen.passed_over and not fall_back:
        return ResumeFolder(chosen.passed_over[0][0])
    return chosen


def meant(given: Any) -> Any:
    """Return the value of ``resume_from_checkpoint`` that a command line means.

    There, ``True`` arrives as a text, which Trainer takes as the name of a folder.
    """
    value = {"true": True, "false": None}.get(given.strip().lower(), given) if isinstance(given, str) else given
    return given if value is given or os.path.exists(given) else value


def remark(options: Options, given: Any, output_dir: str) -> str:
    """Return what a user of steering may not expect of a run that resumes as its arguments say; '' if there is nothing.

    ``given``: value of ``resume_from_checkpoint``.
    """
    if options.auto_resume != "steering" or not steered.under_steering() or not os.path.isdir(output_dir):
        return ""
    present = trainer_folders.folders(output_dir)
    if not present:
        return ""
    if given is None:
        return (
            f"{present[0]} is from an earlier run and is not loaded. After a restart, this job resumes from the newest "
            "checkpoint in that folder. Use another output_dir, or resume from it."
        )
    if isinstance(given, str) and steered.in_later_round() and not _same(given, present[0]):
        return (
            f"resume_from_checkpoint={given} is loaded again after the restart, although {present[0]} exists. Without the "
            "argument, a restart resumes from the newest checkpoint."
        )
    return ""


def _saved_batch(arguments: Any) -> Batch | None:
    """Return the batch of the checkpoint that a run resumes from, or of the newest one in its output folder."""
    named, output_dir = getattr(arguments, "resume_from_checkpoint", None), arguments.output_dir
    if isinstance(named, str) and os.path.isdir(named):
        return steered.saved_batch(named)
    if not output_dir or not os.path.isdir(output_dir):
        return None
    found = (steered.saved_batch(folder) for folder in trainer_folders.folders(output_dir))
    return next((batch for batch in found if batch is not None), None)


def _same(folder: str, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)
