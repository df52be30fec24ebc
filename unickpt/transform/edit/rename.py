"""Step that renames tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from unickpt.base.errors import LanguageError, MismatchError
from unickpt.base.listing import some
from unickpt.transform.dialects.name_templates import Template
from unickpt.transform.edit.patterns import no_match, template_of
from unickpt.transform.edit.table import Table, count_of, map_names


@dataclass(frozen=True, slots=True)
class Renaming:
    """One renaming.

    Attributes:
        text: text of the user.
        old, new: templates with the same holes.
    """

    text: str
    old: Template
    new: Template

    @classmethod
    def parse(cls, text: str) -> Renaming:
        """Parse ``OLD=NEW``. Raises LanguageError."""
        old, equals, new = text.partition("=")
        if not equals:
            raise LanguageError(f"{text!r}: expected OLD=NEW")
        found = cls(text, template_of(old, stars=1), template_of(new, stars=1))
        holes, filled = ({(hole.name, hole.text) for hole in each.holes} for each in (found.old, found.new))
        if holes != filled:
            (name, _) = min(holes ^ filled)
            raise LanguageError(f"{text!r}: the hole {name!r} must be in both names")
        return found


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename tensors with all their states, also in parameter groups and among tied and excluded names.

    All renamings apply at once, so two names can be swapped. The first renaming that matches a name is used.
    """

    renamings: tuple[Renaming, ...]

    def apply(self, table: Table) -> Table:
        used: set[str] = set()
        known = [*{entry.info.name: None for entry in table.tensors()}, *table.aliases, *table.excluded]
        new = {name: self._new(name, used) for name in dict.fromkeys(known)}
        for renaming in self.renamings:
            if renaming.text not in used:
                raise no_match(renaming.text.partition("=")[0], table)
        _check(new, table)
        entries = [
            entry if new[entry.info.name] == entry.info.name else replace(
                entry, info=replace(entry.info, name=new[entry.info.name]), origin=entry.origin_after(f"of {entry.info.name}")
            )
            for entry in table.tensors()
        ]  # fmt: skip
        record = table.optimizer
        count = sum(name != other for name, other in new.items())
        return replace(
            table,
            entries=table.with_objects(entries),
            aliases={new[alias]: new.get(name, name) for alias, name in table.aliases.items()},
            excluded=tuple(new[name] for name in table.excluded),
            optimizer=record and map_names(record, lambda name: new.get(name) or self._new(name, set()), lambda _: True),
        ).with_done(f"{count_of(count, 'name')} changed, with all their states")

    def _new(self, name: str, used: set[str]) -> str:
        for renaming in self.renamings:
            values = renaming.old.match(name)
            if values is not None:
                used.add(renaming.text)
                if any(isinstance(part, int) and part + hole.more < 0 for hole in renaming.new.holes
                       for part in (values[hole.name],)):  # fmt: skip
                    raise MismatchError(f"{renaming.text!r}: a number in the new name of {name} would be negative")
                return renaming.new.fill(values)
        return name


def _check(new: dict[str, str], table: Table) -> None:
    """Raise MismatchError if two names become the same."""
    of: dict[str, list[str]] = {}
    for name, other in new.items():
        of.setdefault(other, []).append(name)
    clashes = [f"{other} (from {some(names, 3)})" for other, names in of.items() if len(names) > 1]
    if clashes:
        raise MismatchError(f"{table.where}: several tensors would have the same name: {some(clashes, 4)}")
    objects: Collection[str] = {entry.info.name for entry in table.entries.values() if entry.info.kind == "object"}
    taken = [other for name, other in new.items() if other != name and other in objects]
    if taken:
        raise MismatchError(f"{table.where}: {taken[0]} is the name of an object")
