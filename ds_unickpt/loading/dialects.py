"""Presents a checkpoint of another framework under the names of a transformers model in DeepSpeed."""

from __future__ import annotations

import dataclasses
from typing import Any

from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import without_rank
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import Entry
from unickpt.transform.convert import training_progress
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.named_here import under_own_names
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, TranslatedCheckpoint

Shapes = dict[str, tuple[int, ...]]
SCHEDULE = "schedule"  # key in the job's objects: progress of the other framework's learning-rate schedule (Progress)


def as_named_here(checkpoint: Checkpoint, view: EngineView, chosen: str, wanted: Shapes | None = None) -> Checkpoint:
    """Return the checkpoint, which may be of any framework, under the names of this job's model.

    Args:
        chosen: ``load_dialect`` option: model family, or path of a dialect file. '' derives it from the model or the
            checkpoint.
        wanted: shapes of the tensors of all ranks by name, if a rank has only some of them; None: this rank has all.

    Raises:
        LanguageError: there is no dialect for this model, or it does not fit.
        MismatchError: the checkpoint belongs to another model.
    """
    named = under_own_names(
        checkpoint, Model.of_module(view.engine.module), wanted or wanted_here(view), chosen,
        option='"unickpt": {"load_dialect": ...}',
    )  # fmt: skip
    if checkpoint.manifest.writer.dialect == HUGGINGFACE or not isinstance(named, TranslatedCheckpoint):
        return named
    found, notes = _objects(checkpoint, view.engine)
    return dataclasses.replace(named, job_objects=found, job_notes=notes)


def wanted_here(view: EngineView) -> Shapes:
    """Return the shapes of the parameters and persistent buffers of this rank's model, by name."""
    names = view.names
    found = {without_rank(name): view.slices.of(parameter).shape for name, parameter in names.parameters.items()}
    found |= {each.name: tuple(each.tensor.shape) for each in names.buffers if each.persistent}
    return found


def _objects(checkpoint: Checkpoint, engine: Any) -> tuple[dict[str, Any], list[Entry]]:
    """Return the state of the other framework that has a counterpart here (counters), and entries for the report."""
    step, objects = checkpoint.manifest.step, checkpoint.objects().value
    job, schedule = training_progress.of_job(step, objects), training_progress.of_schedule(step, objects)
    known, batch = job.samples is not None, int(engine.train_batch_size())
    job, schedule = job.with_batch(batch), schedule.with_batch(batch)
    how = "from the checkpoint" if known else f"as {step} steps of {batch} samples, because the checkpoint has no count"
    notes = [Entry("engine", "object", "set", f"global_steps {job.steps:,}, global_samples {job.samples:,} {how}")]
    if objects.get("common") is not None:
        reason = "Megatron's arguments and schedule have no counterpart; only the counters are used"
        notes.append(Entry("common", "object", "left out", reason))
    counters = {"global_steps": job.steps, "global_samples": job.samples, "skipped_steps": 0}
    return {"engine": counters, SCHEDULE: schedule}, notes
