"""Steps that drop tensors, keep tensors, or remove the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from unickpt.transform.edit.patterns import Selection, no_match
from unickpt.transform.edit.residuals import without_residuals
from unickpt.transform.edit.table import Table, TableEntry, count_of, map_names


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the tensors that a pattern selects.

    A pattern without a state selects names: a tied tensor stays under its remaining names.
    """

    selections: tuple[Selection, ...]

    def apply(self, table: Table) -> Table:
        return _with_counts(table, _less(table, self.selections, keep=False), "dropped")


@dataclass(frozen=True, slots=True)
class Keep:
    """Drop all tensors that no pattern selects. Objects stay."""

    selections: tuple[Selection, ...]

    def apply(self, table: Table) -> Table:
        return _with_counts(table, _less(table, self.selections, keep=True), "dropped, because no pattern keeps them")


@dataclass(frozen=True, slots=True)
class NoOptimizer:
    """Keep only weights and buffers, without residuals of gradients. A master without a weight becomes the weight."""

    def apply(self, table: Table) -> Table:
        table = without_residuals(table)
        weights = {entry.info.name for entry in table.tensors() if entry.info.state == "weight"}
        kept: list[TableEntry] = []
        for entry in table.tensors():
            if entry.info.state == "master" and entry.info.name not in weights:
                kept.append(replace(entry, info=replace(entry.info, state="weight"), origin=entry.origin_after("its master")))
            elif entry.info.kind != "optimizer" and entry.info.state != "master":
                kept.append(entry)
        after = table.with_entries(kept, optimizer=None)
        states = sum(entry.info.kind == "optimizer" for entry in table.tensors())
        masters = sum(entry.info.state == "master" for entry in table.tensors())
        if not states and not masters and table.optimizer is None:
            return table.with_done("no optimizer to remove")
        line = f"the optimizer: {count_of(states, 'state')}, {count_of(masters, 'master')}, its hyperparameters and steps"
        return _with_stored_weights(table, after).with_left_out(line)


def _less(table: Table, selections: Sequence[Selection], *, keep: bool) -> Table:
    """Return a table without the selected tensors, or with ``keep`` without the others.

    Raises:
        MismatchError: a pattern selects nothing.
    """
    for selection in selections:
        _check(selection, table)
    of_names = [each for each in selections if keep or each.state is None]
    of_states = [each for each in selections if keep or each.state is not None]
    names = {name for every in table.names_of().values() for name in every}
    less = _without_names(table, {name for name in names if any(each.names((name,)) for each in of_names) != keep})
    known = less.names_of()
    return less.with_entries(
        entry
        for entry in less.tensors()
        if any(each.states(entry.info.state) and each.names(known[entry.info.name]) for each in of_states) == keep
    )


def _check(selection: Selection, table: Table) -> None:
    """Raise MismatchError if a pattern matches no tensor and no further name."""
    if selection.state is not None:
        selection.among(table)
    elif not any(selection.names(names) for names in table.names_of().values()):
        raise no_match(selection.text, table)


def _without_names(table: Table, gone: Collection[str]) -> Table:
    """Return a table without some names. A tensor with a remaining name is stored under it."""
    stored: dict[str, str] = {}
    for name, names in table.names_of().items():
        left = [each for each in names if each not in gone]
        if left:
            stored[name] = left[0]
    entries = [
        entry if stored[entry.info.name] == entry.info.name else replace(
            entry, info=replace(entry.info, name=stored[entry.info.name]),
            origin=entry.origin_after(f"tied to {entry.info.name}"),
        )
        for entry in table.tensors() if entry.info.name in stored
    ]  # fmt: skip
    known = table.names_of()
    aliases = {
        alias: stored.get(name, name)
        for alias, name in table.aliases.items()
        if alias not in gone and (name in stored or name not in known) and stored.get(name) != alias
    }
    if table.optimizer is None or all(name == new for name, new in stored.items()):
        return table.with_entries(entries, aliases=aliases)
    record = map_names(table.optimizer, lambda name: stored.get(name, None if name in gone else name), lambda _: True)
    return table.with_entries(entries, aliases=aliases, optimizer=record)


def _with_counts(before: Table, after: Table, how: str) -> Table:
    """Add a note on the number of dropped tensors."""
    dropped = len(before.tensors()) - len(after.tensors())
    untied = sorted(before.aliases.keys() - after.aliases.keys() - {entry.info.name for entry in after.tensors()})
    more = f"; no longer names of tied tensors: {', '.join(untied)}" if untied else ""
    return _with_stored_weights(before, after.with_done(f"{count_of(dropped)} {how}{more}"))


def _with_stored_weights(before: Table, after: Table) -> Table:
    """Add a note on derived weights that are stored because their masters are dropped."""
    derived = {entry.info.key for entry in before.tensors() if entry.info.derived_from is not None}
    real = sum(entry.info.key in derived and entry.info.derived_from is None for entry in after.tensors())
    return after.with_done(f"{count_of(real, 'weight')} stored without their masters") if real else after
