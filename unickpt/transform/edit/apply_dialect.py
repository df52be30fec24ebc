"""Step that applies the rules of a dialect: split, fuse, transpose, stack, rename (docs/reference/dialect-language.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from unickpt.base.errors import LanguageError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.dialects.dialect import MAX_BYTES, Dialect, parse
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint, shapes_of, translated
from unickpt.transform.dialects.translation import counterpart_shapes
from unickpt.transform.edit.table import Table, TableEntry, count_of
from unickpt.transform.edit.table_checkpoint import as_checkpoint

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Translate:
    """Convert tensors from one side of a dialect's rules to the other side.

    A table in the dialect ``other`` becomes one in ``name``, and vice versa. A tensor without a rule is an error. If both
    dialects are the same, the rules convert *there* to *here*, and tensors without a rule do not change.
    """

    dialect: Dialect

    @classmethod
    def read(cls, path: Path) -> Translate:
        """Read a dialect file. Raises LanguageError."""
        try:
            with path.open("rb") as file:
                return cls(parse(file.read(MAX_BYTES + 1).decode(), where=str(path)))
        except (OSError, UnicodeDecodeError) as err:
            raise LanguageError(f"{path}: cannot be read as a dialect ({err})") from err

    def apply(self, table: Table) -> Table:
        facts, own = Model.from_json(table.writer.model).facts, table.writer.dialect
        rules = self.dialect.of_model(facts)
        if own not in (rules.name, rules.other):
            raise LanguageError(
                f"{table.where}: has the dialect {own!r}, but {rules.where} has rules for {rules.name!r} and {rules.other!r}"
            )
        if table.excluded:
            raise MismatchError(
                f"{table.where}: was saved without {some(table.excluded)}, so the rules cannot be applied to them"
            )
        within = rules.name == rules.other
        outward = own == rules.name and not within
        source = as_checkpoint(table)
        sizes = rules.sizes_of(facts)
        given, _ = shapes_of(source)
        stored = {name: shape for name, shape in given.items() if name not in table.aliases}
        wanted = counterpart_shapes(rules.rules, stored, sizes, outward=outward)
        if not wanted:
            raise MismatchError(f"{table.where}: {rules.where} has no rule for any of {some(stored, 4)}")
        aliases = self._aliases(table, rules, given, wanted, sizes, outward)
        view = translated(source, rules.rules, wanted, sizes, outward=outward)
        absent = sorted(wanted.keys() - view.translation.pieces.keys())
        if absent:
            lacks = view.translation.without.get(absent[0], [])
            raise MismatchError(f"{table.where}: {absent[0]} also needs {some(lacks)}, which the checkpoint lacks")
        rest = [name for name in view.untranslated if not within or name not in given]
        if rest:
            raise MismatchError(f"{table.where}: {rules.where} has no counterpart for {some(rest)}")
        kept = set(view.untranslated)
        entries = [_entry(view, at, info) for at, info in enumerate(view.index.tensors)]
        entries += [entry for entry in table.tensors() if entry.info.name in kept]
        record, manifest = table.optimizer, view.manifest
        if record is not None and manifest.optimizer is not None:
            groups = _add_kept(manifest.optimizer.groups, record.groups, kept)
            record = replace(record, groups=groups, scalars=_add_kept(manifest.optimizer.scalars, record.scalars, kept))
        writer = replace(table.writer, dialect=rules.other if outward else rules.name)
        aliases |= {alias: name for alias, name in table.aliases.items() if name in kept}
        line = f"{count_of(len(wanted), 'name')} of {writer.dialect} made of {count_of(len(stored.keys() - kept), 'name')}"
        after = table.with_entries(entries, optimizer=record, aliases=aliases, writer=writer)
        return after.with_done(f"{line} by {rules.where}").with_left_out(*_lost_states(table, view))

    def _aliases(
        self, table: Table, rules: Dialect, given: Shapes, wanted: Shapes, sizes: Mapping[str, int], outward: bool
    ) -> dict[str, str]:
        """Return the further names in the new dialect. Raises MismatchError if tied tensors become different tensors."""
        found: dict[str, str] = {}
        for alias, name in table.aliases.items():
            if name not in given:
                continue
            of, to = (
                list(counterpart_shapes(rules.rules, {each: given[name]}, sizes, outward=outward)) for each in (alias, name)
            )
            if not to:
                continue
            if len(of) != len(to) or any(wanted.get(each) is None for each in to):
                raise MismatchError(
                    f"{table.where}: {alias} is tied to {name}, but {self.dialect.where} converts them to different tensors; "
                    "drop one of the names first"
                )
            found |= {new: old for new, old in zip(of, to, strict=True) if new != old}
        return found


def _entry(view: TranslatedCheckpoint, position: int, info: TensorInfo) -> TableEntry:
    names = sorted({view.stored[piece.source] for piece in view.translation.pieces[info.name]})
    overrides = tuple(view.override_boxes(position)) if info.derived_from is not None else ()
    return TableEntry(info, partial(_read, view, info), f"of {some(names, 3)}", overrides)


def _read(checkpoint: Checkpoint, info: TensorInfo, box: Box) -> torch.Tensor:
    return checkpoint.read_box(info, box, verify="off")


def _add_kept(
    groups: Sequence[ParameterGroup], before: Sequence[ParameterGroup], kept: AbstractSet[str]
) -> tuple[ParameterGroup, ...]:
    """Return groups with new names, and with their old names that do not change."""
    return tuple(
        replace(group, parameters=(*group.parameters, *(name for name in old.parameters if name in kept)))
        for group, old in zip(groups, before, strict=True)
    )


def _lost_states(table: Table, view: TranslatedCheckpoint) -> list[str]:
    """Return notes on states that are dropped because only some sources of a tensor have them."""
    states: dict[str, set[str]] = {}
    for entry in table.tensors():
        states.setdefault(entry.info.name, set()).add(entry.info.state)
    found = []
    for name, pieces in view.translation.pieces.items():
        had = set().union(*(states[view.stored[piece.source]] for piece in pieces))
        lacks = sorted(state for state in had if view.info(name, state) is None)
        if lacks:
            found.append(f"{name}: {', '.join(lacks)}, because only some of its source tensors have it")
    return found
