"""The two layouts of a transformers model: in memory, and in files (and in memory before release 5).

Transformers 5 has all experts of a layer in one tensor in memory, and writes one tensor per expert to files
(``conversion_mapping.py`` of transformers). The rules between both are ordinary dialects:
``configs/dialects/huggingface.*.toml``, with memory *here* and files *there*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from unickpt.dialects.dialect import Dialect
from unickpt.dialects.model_facts import Model
from unickpt.dialects.registry import dialects
from unickpt.dialects.translated_checkpoint import HUGGINGFACE, shapes_of, translated
from unickpt.dialects.translation import counterpart_shapes
from unickpt.load.checkpoint import Checkpoint

FILES = "huggingface-files"


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names and shapes of transformers in memory; the same checkpoint if it has them.

    Raises:
        LanguageError: the number of experts is unknown, or a shape contradicts its rule.
    """
    return _in_layout(checkpoint, outward=False)


def in_files(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names and shapes of transformers files. Raises LanguageError as ``in_memory``."""
    return _in_layout(checkpoint, outward=True)


def as_wanted(checkpoint: Checkpoint, wanted: Mapping[str, Sequence[int]], family: str = "") -> Checkpoint:
    """Return a checkpoint in the layout of a job's model; the same checkpoint if it has that layout, or neither.

    Args:
        checkpoint: checkpoint under names of transformers.
        wanted: shapes of the job's parameters and buffers, by name.
        family: family of the job's model; '' for the family of the checkpoint.

    Raises:
        LanguageError: a shape contradicts its rule.
        MismatchError: tensors that are fused into one have different hyperparameters.
    """
    given, _ = shapes_of(checkpoint)
    missing = wanted.keys() - given.keys()
    if not missing:  # the usual case. To parse all dialects takes a tenth of a second
        return checkpoint
    model = Model.from_json(checkpoint.manifest.writer.model)
    rules = _rules(family or model.family)
    if rules is not None:
        for outward in (False, True):
            if _has(rules, missing, there=outward) and _has(rules, given, there=not outward):
                return translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=outward)
    return checkpoint


def _in_layout(checkpoint: Checkpoint, *, outward: bool) -> Checkpoint:
    writer = checkpoint.manifest.writer
    model = Model.from_json(writer.model)
    rules = _rules(model.family) if writer.dialect == HUGGINGFACE else None
    given, stored = shapes_of(checkpoint)
    if rules is None or not _has(rules, given, there=not outward):
        return checkpoint
    sizes = rules.sizes_of(model.facts)
    own = {name: shape for name, shape in given.items() if stored[name] == name}
    view = translated(
        checkpoint, rules.rules, counterpart_shapes(rules.rules, own, sizes, outward=outward), sizes, outward=outward
    )
    return dataclasses.replace(view, manifest=dataclasses.replace(view.manifest, aliases=checkpoint.manifest.aliases))


def _rules(family: str) -> Dialect | None:
    """Return the rules of a family with two layouts, or None."""
    found = (each for each in dialects() if (each.name, each.other) == (HUGGINGFACE, FILES) and family in each.families)
    return next(found, None)


def _has(rules: Dialect, names: Iterable[str], *, there: bool) -> bool:
    """Return whether some names belong to one layout and not to the other."""
    kinds = [
        item.name
        for rule in rules.rules
        if str(rule.here.name) != str(rule.there[0].name)
        for item in (rule.there if there else (rule.here,))
    ]
    return any(kind.match(name) is not None for name in names for kind in kinds)
