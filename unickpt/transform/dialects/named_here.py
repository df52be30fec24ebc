"""Presents a checkpoint of any framework under the names of a model of transformers, or of another model in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.dialects.hf_layouts import as_wanted
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import choose, dialects
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, shapes_of, translated, uses_names
from unickpt.transform.dialects.translation import counterpart_shapes

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
    if uses_names(checkpoint, wanted):
        return checkpoint
    where = str(checkpoint.storage)
    model = model.with_more(Model.from_json(stored.model), where)
    rules = choose(stored.dialect, HUGGINGFACE, chosen, model.family, where=where, option=option).of_model(model.facts)
    return translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=True)


def through_transformers(checkpoint: Checkpoint, name: str, model: Model, chosen: str = "") -> Checkpoint:
    """Return a checkpoint under the names of transformers if only these lead from its dialect to another one, such as a
    Llama of torchtitan to Megatron; otherwise as it is.

    Args:
        checkpoint: of any framework.
        name: the other dialect.
        model: facts about the model.
        chosen: model family. '' derives it from the model, or from the dialect if this has one family.

    Raises:
        LanguageError: the dialect has no rules for the model, or they do not fit.
        MismatchError: the checkpoint has tensors that the names of transformers do not have.
    """
    stored = checkpoint.manifest.writer
    ways = [each for each in dialects() if (each.name, each.other) == (stored.dialect, HUGGINGFACE)]
    if not ways or any((each.name, each.other) == (name, stored.dialect) for each in dialects()):
        return checkpoint
    where, known = str(checkpoint.storage), sorted({family for each in ways for family in each.families})
    family = chosen or model.family or (known[0] if len(known) == 1 else "")
    rules = choose(stored.dialect, HUGGINGFACE, family, "", where=where).of_model(model.facts)
    sizes = rules.sizes_of(model.facts)
    view = translated(
        checkpoint, rules.rules, counterpart_shapes(rules.rules, shapes_of(checkpoint)[0], sizes, outward=True), sizes,
        outward=True,
    )  # fmt: skip
    if view.untranslated:
        raise MismatchError(f"{where}: transformers has no counterpart of {some(view.untranslated)}. Nothing is loaded.")
    facts = dataclasses.replace(model, family=family).as_json()
    writer = dataclasses.replace(stored, dialect=HUGGINGFACE, model=facts)
    return dataclasses.replace(view, manifest=dataclasses.replace(view.manifest, writer=writer))
