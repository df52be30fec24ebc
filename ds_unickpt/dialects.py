"""A checkpoint of another framework, as a model of transformers under DeepSpeed sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ds_unickpt import capture, internals
from ds_unickpt.capture import Names
from ds_unickpt.huggingface import model_of
from unickpt.language.facts import Model
from unickpt.language.shipped import choose
from unickpt.loading import Checkpoint
from unickpt.translated import translated

OWN = "huggingface"


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
    if stored.dialect == OWN or _has_own_names(checkpoint, engine):
        return checkpoint
    where = str(checkpoint.storage)
    model = model_of(engine.module).with_more(Model.from_json(stored.model), where)
    rules = choose(stored.dialect, OWN, chosen, model.family, where=where, option='"unickpt": {"load_dialect": ...}')
    wanted = {name: internals.shape_of(parameter) for name, parameter in Names.read(engine.module).parameters.items()}
    for name, buffer, persistent in capture.buffers(engine.module):
        if persistent:
            wanted[name] = tuple(buffer.shape)
    view = translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=True)
    return dataclasses.replace(view, job_objects=_objects(checkpoint))


def _has_own_names(checkpoint: Checkpoint, engine: Any) -> bool:
    """A module that is not of transformers, but built of the same parts: nothing has to be translated."""
    return any(name in checkpoint.manifest.aliases or checkpoint.info(name, "weight") is not None
               for name in Names.read(engine.module).parameters)  # fmt: skip


def _objects(checkpoint: Checkpoint) -> dict[str, Any]:
    """What of the other framework's state means the same here: counters."""
    return {"engine": {"global_steps": checkpoint.manifest.step, "global_samples": _samples(checkpoint), "skipped_steps": 0}}


def _samples(checkpoint: Checkpoint) -> int:
    """Samples that were trained on, as Megatron's arguments tell."""
    common = checkpoint.objects().value.get("common")
    arguments = common.get("args") if isinstance(common, Mapping) else None
    found = getattr(arguments, "consumed_train_samples", None)
    return found if type(found) is int and found >= 0 else 0
