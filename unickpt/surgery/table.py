"""The table that steps of surgery change: every tensor with how its boxes are read, and all that is no tensor.

Nothing is read until the table is written. A derived weight (docs/format.md, section 7) is read like any other tensor; what
it is known to differ in from the cast of its master is noted beside it, so that only that is compared and stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from unickpt.converting import Reading
from unickpt.errors import MismatchError
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint
from unickpt.manifest import MANIFEST_FILE, OptimizerRecord, ParameterGroup, Writer
from unickpt.posix import PosixStorage

Key = tuple[str, str]  # name and state


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a table.

    Attributes:
        info: what it is.
        read: of boxes of it.
        was: what it is made of, for people; '' if it is as it was.
        differs: of a derived tensor: disjoint boxes beyond which it is the cast of what it derives from. There, it may be.
    """

    info: TensorInfo
    read: Reading
    was: str = ""
    differs: tuple[Box, ...] = ()

    def told(self, how: str) -> str:
        """``was`` after one more step."""
        return f"{self.was}, {how}" if self.was else how


@dataclass(frozen=True)
class Table:
    """A checkpoint to be.

    Attributes:
        where: it came from, for messages.
        entries: tensors, objects too, by name and state; those of one name are next to one another.
        step, writer, optimizer, aliases, excluded, objects: as of ``Manifest``; objects encoded.
        identity: of what it is made of, so that another source is told from this one.
        inputs: files that change whenever the sources do; none of a source that is a URL.
        done: what the steps did, a line each.
        left_out: what of the source is not in it, and why.
    """

    where: str
    entries: Mapping[Key, Entry]
    step: int
    writer: Writer
    optimizer: OptimizerRecord | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    identity: tuple[str, ...] = ()
    inputs: tuple[Path, ...] = ()
    done: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def tensors(self) -> list[Entry]:
        """All but objects."""
        return [entry for entry in self.entries.values() if entry.info.kind != "object"]

    def states(self, name: str) -> list[Entry]:
        """Tensors of one name."""
        return [entry for entry in self.tensors() if entry.info.name == name]

    def names_of(self) -> dict[str, tuple[str, ...]]:
        """All names of every stored name: its own, and those that are tied to it."""
        names: dict[str, tuple[str, ...]] = {entry.info.name: (entry.info.name,) for entry in self.tensors()}
        for alias, name in self.aliases.items():
            if name in names:
                names[name] += (alias,)
        return names

    def with_entries(self, entries: Iterable[Entry], **more: Any) -> Table:
        """The same with other tensors; objects stay.

        A weight whose master is gone is a tensor of its own; names of which nothing is left are no longer in groups and
        aliases, and a parameter that has lost all states of its optimizer has lost its steps.

        Raises:
            MismatchError: two tensors would have one name.
        """
        found = keyed(entries, self.where)
        for key, entry in found.items():
            parent = entry.info.derived_from
            if parent is not None and (entry.info.name, parent) not in found:
                found[key] = replace(entry, info=replace(entry.info, derived_from=None), differs=())
        objects = {key: entry for key, entry in self.entries.items() if entry.info.kind == "object"}
        after = replace(self, entries={**dict(sorted(found.items())), **objects}, **more)
        return replace(after, optimizer=_trimmed(self, after), aliases=_alive(self, after))

    def did(self, *lines: str) -> Table:
        """The same, with notes."""
        return replace(self, done=(*self.done, *lines))

    def lost(self, *lines: str) -> Table:
        """The same, with notes of what is left out."""
        return replace(self, left_out=(*self.left_out, *lines))


class Step(Protocol):
    """Frozen, and its ``repr`` tells all of it: by that a surgery which was cut off is known again."""

    def apply(self, table: Table) -> Table:
        """The table after it. Raises MismatchError, LanguageError."""


def table_of(checkpoint: Checkpoint) -> Table:
    """A checkpoint as a table; of a translated one, its names are those of its dialect.

    Fragments are not read against their checksums: boxes that are read cross them at any place, so whoever wants that
    verifies the checkpoint before (``unickpt.verification``).
    """
    entries = {}
    for position, info in enumerate(checkpoint.index.tensors):
        differs = tuple(checkpoint.override_boxes(position)) if info.derived_from is not None else ()
        entries[info.key] = Entry(info, partial(_read, checkpoint, info), differs=differs)
    manifest, storage = checkpoint.manifest, checkpoint.storage
    inputs = (Path(storage.where(MANIFEST_FILE)),) if isinstance(storage, PosixStorage) else ()
    return Table(
        str(storage), entries, manifest.step, manifest.writer, manifest.optimizer, manifest.aliases, manifest.excluded,
        manifest.objects, (checkpoint.identity,), inputs,
    )  # fmt: skip


def keyed(entries: Iterable[Entry], where: str) -> dict[Key, Entry]:
    """By name and state. Raises MismatchError if two would be one."""
    found: dict[Key, Entry] = {}
    for entry in entries:
        other = found.setdefault(entry.info.key, entry)
        if other is not entry:
            told = " and one that ".join(f"is {each.was or 'as it was'}" for each in (other, entry))
            raise MismatchError(f"{where}: two tensors would be {entry.info.name} ({entry.info.state}): one that {told}")
    return found


def _read(checkpoint: Checkpoint, info: TensorInfo, box: Box) -> Any:
    return checkpoint.read_box(info, box, verify="off")


def count_of(number: int, what: str = "tensor") -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Names for a message, not too many."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def map_names(record: OptimizerRecord, names: Callable[[str], str | None], scalars: Callable[[str], bool]) -> OptimizerRecord:
    """A record under other names.

    Args:
        names: new name of a parameter, or None if it is gone.
        scalars: whether a parameter (by its old name) keeps its scalars.
    """

    def mapped(group: ParameterGroup, kept: Callable[[str], bool]) -> ParameterGroup:
        found = [names(name) for name in group.parameters if kept(name)]
        return replace(group, parameters=tuple(name for name in found if name is not None))

    groups = tuple(mapped(group, lambda _: True) for group in record.groups)
    counts = tuple(mapped(group, scalars) for group in record.scalars)
    return OptimizerRecord(record.name, groups, tuple(group for group in counts if group.parameters))


def _trimmed(before: Table, after: Table) -> OptimizerRecord | None:
    if after.optimizer is None:
        return None
    names = {entry.info.name for entry in after.tensors()}
    known = {entry.info.name for entry in before.tensors()}  # parameters without any tensor stay as they were
    had = {entry.info.name for entry in before.tensors() if entry.info.kind == "optimizer"}
    has = {entry.info.name for entry in after.tensors() if entry.info.kind == "optimizer"}
    return map_names(
        after.optimizer,
        lambda name: name if name in names or name not in known else None,
        lambda name: name in has or name not in had,
    )


def _alive(before: Table, after: Table) -> dict[str, str]:
    """Further names of what is there, and of what never was."""
    names, known = ({entry.info.name for entry in table.tensors()} for table in (after, before))
    return {
        alias: name for alias, name in after.aliases.items()
        if alias not in names and (name in names or name not in known)
    }  # fmt: skip
