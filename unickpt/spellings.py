"""Two spellings of one model of transformers: as it is in memory, and as its files (and releases before 5) have it.

Transformers 5 has all experts of a layer in one tensor, and writes each by itself (``conversion_mapping.py`` of transformers).
The rules between the two are dialects like any other: ``configs/dialects/huggingface.*.toml``, memory *here*, files *there*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from unickpt.language.dialect import Dialect
from unickpt.language.facts import Model
from unickpt.language.shipped import dialects
from unickpt.language.translation import listed
from unickpt.loading import Checkpoint
from unickpt.translated import HUGGINGFACE, shapes_of, translated

FILES = "huggingface-files"


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with names and shapes that models of transformers have in memory; itself, if it has them.

    Raises:
        LanguageError: how many experts there are is not known, or a shape contradicts its rule.
    """
    return _spelled(checkpoint, outward=False)


def in_files(checkpoint: Checkpoint) -> Checkpoint:
    """The same with names and shapes that files of transformers have. Raises LanguageError likewise."""
    return _spelled(checkpoint, outward=True)


def as_wanted(checkpoint: Checkpoint, wanted: Mapping[str, Sequence[int]], family: str = "") -> Checkpoint:
    """A checkpoint in the spelling of a job's model; itself, if it is in that, or in neither.

    Args:
        checkpoint: under names of transformers.
        wanted: shapes of the job's parameters and buffers, by name.
        family: of the job's model, if it tells; else the checkpoint's.

    Raises:
        LanguageError: a shape contradicts its rule.
        MismatchError: tensors that become one have different hyperparameters.
    """
    model = Model.from_json(checkpoint.manifest.writer.model)
    rules = _rules(family or model.family)
    given, _ = shapes_of(checkpoint)
    missing = wanted.keys() - given.keys()
    if rules is not None and missing:
        for outward in (False, True):
            if _has(rules, missing, there=outward) and _has(rules, given, there=not outward):
                return translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts), outward=outward)
    return checkpoint


def _spelled(checkpoint: Checkpoint, *, outward: bool) -> Checkpoint:
    writer = checkpoint.manifest.writer
    model = Model.from_json(writer.model)
    rules = _rules(model.family) if writer.dialect == HUGGINGFACE else None
    given, stored = shapes_of(checkpoint)
    if rules is None or not _has(rules, given, there=not outward):
        return checkpoint
    sizes = rules.sizes_of(model.facts)
    own = {name: shape for name, shape in given.items() if stored[name] == name}
    view = translated(checkpoint, rules.rules, listed(rules.rules, own, sizes, outward=outward), sizes, outward=outward)
    return dataclasses.replace(view, manifest=dataclasses.replace(view.manifest, aliases=checkpoint.manifest.aliases))


def _rules(family: str) -> Dialect | None:
    """Of a family that has two spellings."""
    found = (each for each in dialects() if (each.name, each.other) == (HUGGINGFACE, FILES) and family in each.families)
    return next(found, None)


def _has(rules: Dialect, names: Iterable[str], *, there: bool) -> bool:
    """Whether names are in one of the spellings: any of those that the other has otherwise."""
    kinds = [
        item.name
        for rule in rules.rules
        if str(rule.here.name) != str(rule.there[0].name)
        for item in (rule.there if there else (rule.here,))
    ]
    return any(kind.match(name) is not None for name in names for kind in kinds)
