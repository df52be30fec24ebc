"""The layouts of a transformers model: in memory, in files (and in memory before release 5), and under AutoEP of DeepSpeed.

Transformers 5 has all experts of a layer in one tensor in memory, and writes one tensor per expert to files
(``conversion_mapping.py`` of transformers). AutoEP has the two projections of a fused tensor apart. The rules between each of
these layouts and memory are ordinary dialects: ``configs/dialects/huggingface*.toml``, with memory *here*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.dialects.dialect import Dialect
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import dialects
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, shapes_of, translated
from unickpt.transform.dialects.translation import counterpart_shapes

FILES = "huggingface-files"
AUTO_EP = "huggingface-autoep"


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names and shapes of transformers in memory; the same checkpoint if it has them.

    Raises:
        LanguageError: the number of experts is unknown, or a shape contradicts its rule.
    """
    rules = _layout_of(shapes_of(checkpoint)[0], _own_layouts(checkpoint))
    return checkpoint if rules is None else _in_all(checkpoint, rules, outward=False)


def in_files(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names and shapes of transformers files. Raises LanguageError as ``in_memory``."""
    layouts = _own_layouts(checkpoint)
    files = next((rules for rules in layouts if rules.other == FILES), None)
    if files is None or _layout_of(shapes_of(checkpoint)[0], layouts) is files:
        return checkpoint
    memory = in_memory(checkpoint)
    return _in_all(memory, files, outward=True) if has_names_of(files, shapes_of(memory)[0], there=False) else memory


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
    layouts = layouts_of(family or model.family)
    source, target = _layout_of(given, layouts), _layout_of(missing, layouts)
    if source is not None and source is not target:
        to_memory = target is None and has_names_of(source, missing, there=False)
        if target is None and not to_memory:
            return checkpoint
        if to_memory:
            return translated(checkpoint, source.rules, wanted, source.sizes_of(model.facts), outward=False)
        checkpoint = _in_all(checkpoint, source, outward=False)
    if target is None or target is source or not has_names_of(target, shapes_of(checkpoint)[0], there=False):
        return checkpoint
    return translated(checkpoint, target.rules, wanted, target.sizes_of(model.facts), outward=True)


def _in_all(checkpoint: Checkpoint, rules: Dialect, *, outward: bool) -> Checkpoint:
    """Return a checkpoint with all of its tensors in another layout."""
    sizes = rules.sizes_of(Model.from_json(checkpoint.manifest.writer.model).facts)
    given, stored = shapes_of(checkpoint)
    own = {name: shape for name, shape in given.items() if stored[name] == name}
    view = translated(
        checkpoint, rules.rules, counterpart_shapes(rules.rules, own, sizes, outward=outward), sizes, outward=outward
    )
    return dataclasses.replace(view, manifest=dataclasses.replace(view.manifest, aliases=checkpoint.manifest.aliases))


def _own_layouts(checkpoint: Checkpoint) -> list[Dialect]:
    writer = checkpoint.manifest.writer
    return layouts_of(Model.from_json(writer.model).family) if writer.dialect == HUGGINGFACE else []


def layouts_of(family: str) -> list[Dialect]:
    """Return the rules between memory and each other layout of a family."""
    return [
        each for each in dialects() if each.name == HUGGINGFACE and each.other in (FILES, AUTO_EP) and family in each.families
    ]


def _layout_of(names: Iterable[str], layouts: Sequence[Dialect]) -> Dialect | None:
    """Return the rules of the layout to which some of the names belong; None for memory, or for names without a layout."""
    names = list(names)
    return next((rules for rules in layouts if has_names_of(rules, names, there=True)), None)


def has_names_of(rules: Dialect, names: Iterable[str], *, there: bool) -> bool:
    """Return whether some names belong to one layout and not to the other."""
    kinds = [
        item.name
        for rule in rules.rules
        if str(rule.here.name) != str(rule.there[0].name)
        for item in (rule.there if there else (rule.here,))
    ]
    return any(kind.match(name) is not None for name in names for kind in kinds)
