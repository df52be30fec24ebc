"""The rules of a dialect as a step: split, fuse, transpose, stack, rename (docs/language.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from unickpt.errors import LanguageError, MismatchError
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.language.dialect import MAX_BYTES, Dialect, parse
from unickpt.language.facts import Model
from unickpt.language.translation import listed
from unickpt.loading import Checkpoint
from unickpt.manifest import ParameterGroup
from unickpt.surgery.table import Entry, Table, count_of, some_of
from unickpt.surgery.viewing import as_checkpoint
from unickpt.translated import TranslatedCheckpoint, shapes_of, translated

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Translate:
    """Make tensors of one side of a dialect's rules into those of the other.

    A table of the dialect ``other`` becomes one of ``name``, and the other way round; what no rule knows is an error then.
    Rules within one dialect (both are the same) make what is *here* of what is *there*, and leave all else as it is.
    """

    dialect: Dialect

    @classmethod
    def read(cls, path: Path) -> Translate:
        """From a dialect's file. Raises LanguageError."""
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
                f"{table.where} is of the dialect {own!r}; {rules.where} has rules for {rules.name!r} and {rules.other!r}"
            )
        if table.excluded:
            raise MismatchError(
                f"{table.where}: was saved without {some_of(table.excluded)}: what these would be cannot be told"
            )
        within = rules.name == rules.other
        outward = own == rules.name and not within
        source = as_checkpoint(table)
        sizes = rules.sizes_of(facts)
        given, _ = shapes_of(source)
        stored = {name: shape for name, shape in given.items() if name not in table.aliases}
        wanted = listed(rules.rules, stored, sizes, outward=outward)
        if not wanted:
            raise MismatchError(f"{table.where}: {rules.where} has no rule for any of {some_of(stored, 4)}")
        aliases = self._aliases(table, rules, given, wanted, sizes, outward)
        view = translated(source, rules.rules, wanted, sizes, outward=outward)
        absent = sorted(wanted.keys() - view.translation.pieces.keys())
        if absent:
            lacks = view.translation.without.get(absent[0], [])
            raise MismatchError(f"{table.where}: {absent[0]} is made of {some_of(lacks)} too, which is not there")
        rest = [name for name in view.untranslated if not within or name not in given]
        if rest:
            raise MismatchError(f"{table.where}: {rules.where} has no counterpart of {some_of(rest)}")
        kept = set(view.untranslated)
        entries = [_entry(view, at, info) for at, info in enumerate(view.index.tensors)]
        entries += [entry for entry in table.tensors() if entry.info.name in kept]
        record, manifest = table.optimizer, view.manifest
        if record is not None and manifest.optimizer is not None:
            groups = _with(manifest.optimizer.groups, record.groups, kept)
            record = replace(record, groups=groups, scalars=_with(manifest.optimizer.scalars, record.scalars, kept))
        writer = replace(table.writer, dialect=rules.other if outward else rules.name)
        aliases |= {alias: name for alias, name in table.aliases.items() if name in kept}
        told = f"{count_of(len(wanted), 'name')} of {writer.dialect} made of {count_of(len(stored.keys() - kept), 'name')}"
        after = table.with_entries(entries, optimizer=record, aliases=aliases, writer=writer)
        return after.did(f"{told} by {rules.where}").lost(*_lost(table, view))

    def _aliases(
        self, table: Table, rules: Dialect, given: Shapes, wanted: Shapes, sizes: Mapping[str, int], outward: bool
    ) -> dict[str, str]:
        """Further names in the new dialect. Raises MismatchError if tied tensors become what is not tied."""
        found: dict[str, str] = {}
        for alias, name in table.aliases.items():
            if name not in given:
                continue
            of, to = (list(listed(rules.rules, {each: given[name]}, sizes, outward=outward)) for each in (alias, name))
            if not to:
                continue
            if len(of) != len(to) or any(wanted.get(each) is None for each in to):
                raise MismatchError(
                    f"{table.where}: {alias} is tied to {name}, and {self.dialect.where} makes different tensors of the two; "
                    "drop one of the names before"
                )
            found |= {new: old for new, old in zip(of, to, strict=True) if new != old}
        return found


def _entry(view: TranslatedCheckpoint, position: int, info: TensorInfo) -> Entry:
    names = sorted({view.stored[piece.source] for piece in view.translation.pieces[info.name]})
    differs = tuple(view.override_boxes(position)) if info.derived_from is not None else ()
    return Entry(info, partial(_read, view, info), f"of {some_of(names, 3)}", differs)


def _read(checkpoint: Checkpoint, info: TensorInfo, box: Box) -> torch.Tensor:
    return checkpoint.read_box(info, box, verify="off")


def _with(
    groups: Sequence[ParameterGroup], before: Sequence[ParameterGroup], kept: AbstractSet[str]
) -> tuple[ParameterGroup, ...]:
    """Groups of new names, with those of their old ones that stay."""
    return tuple(
        replace(group, parameters=(*group.parameters, *(name for name in old.parameters if name in kept)))
        for group, old in zip(groups, before, strict=True)
    )


def _lost(table: Table, view: TranslatedCheckpoint) -> list[str]:
    """States that not all sources of a tensor have: it cannot have them."""
    states: dict[str, set[str]] = {}
    for entry in table.tensors():
        states.setdefault(entry.info.name, set()).add(entry.info.state)
    found = []
    for name, pieces in view.translation.pieces.items():
        had = set().union(*(states[view.stored[piece.source]] for piece in pieces))
        lacks = sorted(state for state in had if view.info(name, state) is None)
        if lacks:
            found.append(f"{name}: {', '.join(lacks)}, which only some of the tensors have that it is made of")
    return found
