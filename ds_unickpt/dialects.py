"""A checkpoint of another framework, as a model of transformers under DeepSpeed sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ds_unickpt import internals
from ds_unickpt.huggingface import model_of
from ds_unickpt.names import Names, buffers
from unickpt import schedules
from unickpt.language.facts import Model
from unickpt.language.shipped import choose
from unickpt.loading import Checkpoint
from unickpt.report import Entry
from unickpt.spellings import as_wanted
from unickpt.translated import translated

OWN = "huggingface"
SCHEDULE = "schedule"  # in the job's objects: how far the other framework's learning-rate schedule was (Progress)


def as_named_here(checkpoint: Checkpoint, engine: Any, chosen: str) -> Checkpoint:
    """The checkpoint under the names of this job's model.

    Args:
        checkpoint: of whatever framework.
        engine: whose model it is for.
        chosen: family, or path of a dialect's file, where neither model nor checkpoint tells; '' as a rule.

    Raises:
        LanguageError: no dialect for this model is known, or it does not fit.
        MismatchError: the checkpoint is of another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == OWN:
        return as_wanted(checkpoint, _wanted(engine), model_of(engine.module).family)
    if _has_own_names(checkpoint, engine):
        return checkpoint
    where = str(checkpoint.storage)
    model = model_of(engine.module).with_more(Model.from_json(stored.model), where)
    rules = choose(stored.dialect, OWN, chosen, model.family, where=where, option='"unickpt": {"load_dialect": ...}')
    rules, wanted = rules.of_model(model.facts), _wanted(engine)
    view = translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=True)
    found, notes = _objects(checkpoint, engine)
    return dataclasses.replace(view, job_objects=found, job_notes=notes)


def _wanted(engine: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters and persistent buffers of this job's model, by name."""
    found = {name: internals.shape_of(parameter) for name, parameter in Names.read(engine.module).parameters.items()}
    found |= {name: tuple(buffer.shape) for name, buffer, persistent in buffers(engine.module) if persistent}
    return found


def _has_own_names(checkpoint: Checkpoint, engine: Any) -> bool:
    """A module that is not of transformers, but built of the same parts: nothing has to be translated."""
    return any(name in checkpoint.manifest.aliases or checkpoint.info(name, "weight") is not None
               for name in Names.read(engine.module).parameters)  # fmt: skip


def _objects(checkpoint: Checkpoint, engine: Any) -> tuple[dict[str, Any], list[Entry]]:
    """What of the other framework's state means the same here: counters; and what to say about it."""
    step, objects = checkpoint.manifest.step, checkpoint.objects().value
    job, schedule = schedules.of_job(step, objects), schedules.of_schedule(step, objects)
    known, batch = job.samples is not None, int(engine.train_batch_size())
    job, schedule = job.with_batch(batch), schedule.with_batch(batch)
    how = "of the checkpoint" if known else f"as {step} steps of {batch} samples, because the checkpoint does not tell"
    notes = [Entry("engine", "object", "set", f"global_steps {job.steps:,}, global_samples {job.samples:,} {how}")]
    if objects.get("common") is not None:
        reason = "but for its counters: Megatron's arguments, and the form of its schedule, are Megatron's"
        notes.append(Entry("common", "object", "left out", reason))
    counters = {"global_steps": job.steps, "global_samples": job.samples, "skipped_steps": 0}
    return {"engine": counters, SCHEDULE: schedule}, notes
