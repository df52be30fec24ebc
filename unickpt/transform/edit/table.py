"""The table that edit steps transform: every tensor with the function that reads its boxes, and the non-tensor state.

Nothing is read until the table is written. A derived weight (docs/reference/format.md, section 7) is read like any other
tensor. The table has the boxes in which it may differ from the cast of its master; only these are compared and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, OptimizerRecord, ParameterGroup, Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.transform.convert.huggingface.model_files import ModelFiles, kept_by
from unickpt.transform.convert.readings import Reading

TensorKey = tuple[str, str]  # name and state


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A tensor of a table.

    Attributes:
        info: description of the tensor.
        read: function that reads boxes of it.
        origin: source of the tensor in words; '' if it is unchanged.
        overrides: disjoint boxes in which a derived tensor may differ from the cast. Elsewhere it is the cast.
    """

    info: TensorInfo
    read: Reading
    origin: str = ""
    overrides: tuple[Box, ...] = ()

    def origin_after(self, how: str) -> str:
        """Return ``origin`` with one more step."""
        return f"{self.origin}, {how}" if self.origin else how


@dataclass(frozen=True)
class Table:
    """The content of a checkpoint that is not written yet.

    Attributes:
        where: source, for messages.
        entries: tensors and objects by name and state. Those of one name are adjacent.
        step, writer, optimizer, aliases, excluded, objects: as in ``Manifest``, objects encoded.
        identity: identities of the sources.
        inputs: files that change whenever the sources change; empty for a URL.
        done: one line per step.
        left_out: dropped parts of the source, with the reason.
        model_files: configuration and tokenizer of the model, if the source has them.
        described: shapes of the weights that this configuration describes, by name.
    """

    where: str
    entries: Mapping[TensorKey, TableEntry]
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
    model_files: ModelFiles | None = None
    described: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tensors(self) -> list[TableEntry]:
        """Return all tensors except objects."""
        return [entry for entry in self.entries.values() if entry.info.kind != "object"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight, or of the master of a parameter without one, by name."""
        found = [entry.info for entry in self.tensors() if entry.info.kind in ("parameter", "buffer")]
        return {info.name: info.shape for info in sorted(found, key=lambda info: info.state == "weight")}

    def states(self, name: str) -> list[TableEntry]:
        """Return the tensors of one name."""
        return [entry for entry in self.tensors() if entry.info.name == name]

    def names_of(self) -> dict[str, tuple[str, ...]]:
        """Return all names of every stored name: itself, and the names tied to it."""
        names: dict[str, tuple[str, ...]] = {entry.info.name: (entry.info.name,) for entry in self.tensors()}
        for alias, name in self.aliases.items():
            if name in names:
                names[name] += (alias,)
        return names

    def with_objects(self, tensors: Iterable[TableEntry]) -> dict[TensorKey, TableEntry]:
        """Return tensors, sorted, and after them the objects of this table. Raises MismatchError if two have the same key."""
        objects = {key: entry for key, entry in self.entries.items() if entry.info.kind == "object"}
        return {**dict(sorted(by_key(tensors, self.where).items())), **objects}

    def with_entries(self, entries: Iterable[TableEntry], **more: Any) -> Table:
        """Return a table with other tensors and the same objects.

        A weight without its master becomes a stored tensor. Names without tensors are removed from groups and aliases. A
        parameter without optimizer states loses its step.

        Raises:
            MismatchError: two tensors have the same name and state.
        """
        found = by_key(entries, self.where)
        for key, entry in found.items():
            parent = entry.info.derived_from
            if parent is not None and (entry.info.name, parent) not in found:
                found[key] = replace(entry, info=replace(entry.info, derived_from=None), overrides=())
        after = replace(self, entries=self.with_objects(found.values()), **more)
        return replace(after, optimizer=_trimmed(self, after), aliases=_remaining_aliases(self, after))

    def with_done(self, *lines: str) -> Table:
        """Return a table with more lines in ``done``."""
        return replace(self, done=(*self.done, *lines))

    def with_left_out(self, *lines: str) -> Table:
        """Return a table with more lines in ``left_out``."""
        return replace(self, left_out=(*self.left_out, *lines))


class Step(Protocol):
    """An edit step. It is frozen, and its ``repr`` is complete: an interrupted edit is recognized by it."""

    def apply(self, table: Table) -> Table:
        """Return the table after this step. Raises MismatchError, LanguageError."""


def table_of(checkpoint: Checkpoint) -> Table:
    """Return a checkpoint as a table. A translated checkpoint has the names of its dialect.

    Checksums are not verified, because the boxes that are read do not align with fragments. Call ``verify_checkpoint`` first.
    """
    entries = {}
    for position, info in enumerate(checkpoint.index.tensors):
        overrides = tuple(checkpoint.override_boxes(position)) if info.derived_from is not None else ()
        entries[info.key] = TableEntry(info, partial(_read, checkpoint, info), overrides=overrides)
    manifest, storage = checkpoint.manifest, checkpoint.storage
    local = isinstance(storage, PosixStorage)
    table = Table(
        str(storage), entries, manifest.step, manifest.writer, manifest.optimizer, manifest.aliases, manifest.excluded,
        manifest.objects, (checkpoint.identity,), (Path(storage.where(MANIFEST_FILE)),) if local else (),
    )  # fmt: skip
    return replace(table, model_files=kept_by(Path(storage.where())), described=table.shapes()) if local else table


def by_key(entries: Iterable[TableEntry], where: str) -> dict[TensorKey, TableEntry]:
    """Return entries by name and state. Raises MismatchError if two have the same."""
    found: dict[TensorKey, TableEntry] = {}
    for entry in entries:
        other = found.setdefault(entry.info.key, entry)
        if other is not entry:
            both = " and ".join(f"({each.origin or 'unchanged'})" for each in (other, entry))
            raise MismatchError(f"{where}: two tensors would become {entry.info.name} ({entry.info.state}): {both}")
    return found


def _read(checkpoint: Checkpoint, info: TensorInfo, box: Box) -> Any:
    return checkpoint.read_box(info, box, verify="off")


def count_of(number: int, what: str = "tensor") -> str:
    """Return text such as ``1 tensor`` or ``2 tensors``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def map_names(record: OptimizerRecord, names: Callable[[str], str | None], scalars: Callable[[str], bool]) -> OptimizerRecord:
    """Return an optimizer record with other parameter names.

    Args:
        record: the record.
        names: maps a name to the new name, or to None to remove the parameter.
        scalars: whether a parameter (by its old name) keeps its scalars.
    """

    def mapped(group: ParameterGroup, kept: Callable[[str], bool]) -> ParameterGroup:
        found = [names(name) for name in group.parameters if kept(name)]
        return replace(group, parameters=tuple(name for name in found if name is not None))

    groups = tuple(mapped(group, lambda _: True) for group in record.groups)
    counts = tuple(mapped(group, scalars) for group in record.scalars)
    return OptimizerRecord(record.name, groups, tuple(group for group in counts if group.parameters), record.stepped)


def _trimmed(before: Table, after: Table) -> OptimizerRecord | None:
    if after.optimizer is None:
        return None
    names = {entry.info.name for entry in after.tensors()}
    known = {entry.info.name for entry in before.tensors()}  # parameters without any tensor do not change
    had = {entry.info.name for entry in before.tensors() if entry.info.kind == "optimizer"}
    has = {entry.info.name for entry in after.tensors() if entry.info.kind == "optimizer"}
    return map_names(
        after.optimizer,
        lambda name: name if name in names or name not in known else None,
        lambda name: name in has or name not in had,
    )


def _remaining_aliases(before: Table, after: Table) -> dict[str, str]:
    """Return the further names of remaining tensors, and of parameters that never had a tensor."""
    names, known = ({entry.info.name for entry in table.tensors()} for table in (after, before))
    return {alias: name for alias, name in after.aliases.items() if alias not in names and (name in names or name not in known)}
