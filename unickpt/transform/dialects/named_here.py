"""Presents a checkpoint of any framework under the names of a model of transformers, or of another model in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.dialects.hf_layouts import as_wanted
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import choose
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, translated

Shapes = Mapping[str, Sequence[int]]


def under_own_names(checkpoint: Checkpoint, model: Model, wanted: Shapes, chosen: str, *, option: str) -> Checkpoint:
    """Return the checkpoint under the names of this job's model; the same checkpoint if it has them.

    Args:
        checkpoint: of any framework.
        model: facts about this job's model.
        wanted: shapes of its parameters and persistent buffers, by name.
        chosen: model family, or path of a dialect file. '' derives it from the model or the checkpoint.
        option: option for the choice, in messages.

    Raises:
        LanguageError: there is no dialect for this model, or it does not fit.
        MismatchError: the checkpoint belongs to another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == HUGGINGFACE:
        return as_wanted(checkpoint, wanted, model.family)
    if _has_own_names(checkpoint, wanted):
        return checkpoint
    where = str(checkpoint.storage)
    model = model.with_more(Model.from_json(stored.model), where)
    rules = choose(stored.dialect, HUGGINGFACE, chosen, model.family, where=where, option=option).of_model(model.facts)
    return translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=True)


def _has_own_names(checkpoint: Checkpoint, wanted: Shapes) -> bool:
    """Whether the checkpoint already uses this job's names, such as for a module built from the same parts.

    One name in common proves nothing: many models have ``lm_head.weight``.
    """
    aliases = checkpoint.manifest.aliases
    return 2 * sum(name in aliases or checkpoint.info(name, "weight") is not None for name in wanted) > len(wanted)
