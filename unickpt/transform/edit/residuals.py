"""Step that changes the residuals of compressed gradients: for another number of ranks, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from unickpt.base.errors import FormatError, MismatchError
from unickpt.checkpoint.format import objects
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.layout import SHARED_PREFIX, SHARED_TENSORS_PREFIX
from unickpt.training.compression.carried import COMMON, OF_OPTIMIZERS, STORED, Residuals, resized, slice_of
from unickpt.transform.edit.table import Table, TableEntry, TensorKey, count_of

_OBJECT, _TENSORS = f"{SHARED_PREFIX}{STORED}", f"{SHARED_TENSORS_PREFIX}{STORED}"
_OF_OPTIMIZERS = (f"{SHARED_PREFIX}{OF_OPTIMIZERS}", f"{SHARED_TENSORS_PREFIX}{OF_OPTIMIZERS}")


@dataclass(frozen=True, slots=True)
class ResizeResiduals:
    """Make residuals for another number of ranks, as a load does, or remove them.

    Attributes:
        ranks: number of ranks; 0: no residuals.
    """

    ranks: int

    def apply(self, table: Table) -> Table:
        """Return the table with other residuals. One parameter of all ranks is read at a time.

        Raises:
            MismatchError: there are no residuals.
            FormatError: they are incomplete or damaged.
        """
        if not _keys(table):
            raise MismatchError(f"{table.where}: has no residuals of compressed gradients")
        if not self.ranks:
            return without_residuals(table, "not wanted")
        saved = _Saved.of(table)
        before = len(saved.ranks)
        if before == self.ranks:
            return table.with_done(f"residuals are those of {count_of(before, 'rank')} already")
        kept = {key: entry for key, entry in table.entries.items() if not _of_rank(key[0])}
        made = {entry.info.key: entry for rank in range(self.ranks) for entry in saved.entries_of(rank, self.ranks)}
        line = f"residuals of {count_of(before, 'rank')} made into those of {self.ranks}: each has the mean"
        return replace(table, entries={**kept, **made}).with_done(line)


def without_residuals(table: Table, why: str = "they belong to the steps of an optimizer on these tensors") -> Table:
    """Return a table without residuals, also without those of 1-bit optimizers."""
    keys = {*_keys(table), *(key for key in table.entries if key[0].startswith(_OF_OPTIMIZERS))}
    if not keys:
        return table
    left = {key: entry for key, entry in table.entries.items() if key not in keys}
    return replace(table, entries=left).with_left_out(f"residuals of compressed gradients: {why}")


def _keys(table: Table) -> list[TensorKey]:
    return [key for key in table.entries if key[0].startswith((_OBJECT, _TENSORS))]


def _of_rank(name: str) -> bool:
    return any(name.startswith(start) and not name.startswith(start + COMMON) for start in (_OBJECT, _TENSORS))


@dataclass
class _Named(Mapping[str, torch.Tensor]):
    """Stands for the tensors of an object without reading them, and notes the key of each."""

    entries: Mapping[TensorKey, TableEntry]
    keys_of: dict[int, str] = field(default_factory=dict)
    marks: list[torch.Tensor] = field(default_factory=list)

    def __getitem__(self, key: str) -> torch.Tensor:
        if not key.startswith(_TENSORS) or (key, "object") not in self.entries:
            raise KeyError(key)
        self.marks.append(torch.empty(0))
        self.keys_of[id(self.marks[-1])] = key
        return self.marks[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.entries if name.startswith(_TENSORS))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class _Saved:
    """The residuals of all ranks that saved, by name of the parameter, not yet read."""

    ranks: tuple[tuple[Mapping[str, TableEntry], Mapping[str, TableEntry]], ...]  # sent, returned

    @classmethod
    def of(cls, table: Table) -> _Saved:
        first = _residuals(table, 0)
        return cls((first[1:], *(_residuals(table, rank)[1:] for rank in range(1, first[0]))))

    def entries_of(self, rank: int, world: int) -> Iterator[TableEntry]:
        """Yield the entries of a new rank: the object, and its tensors."""
        sizes = {name: entry.info.numel for sent, _ in self.ranks for name, entry in sent.items()}
        totals: dict[str, int] = {}
        for _, returned in self.ranks:
            for name, entry in returned.items():
                totals[name] = totals.get(name, 0) + entry.info.numel
        made: list[tuple[int, Callable[[], torch.Tensor]]] = [
            *((size, partial(self._sent, name, rank, world)) for name, size in sizes.items()),
            *((_length(total, rank, world), partial(self._returned, name, rank, world)) for name, total in totals.items()),
        ]
        marks = Residuals(rank, world, *({name: torch.empty(0) for name in names} for names in (sizes, totals)))
        encoded = objects.encode(marks.to_object(), prefix=f"{_TENSORS}{rank}")  # tensors are numbered in their order
        text = torch.frombuffer(bytearray(json.dumps(encoded.value).encode()), dtype=torch.uint8)
        yield _entry(f"{_OBJECT}{rank}", text.dtype, len(text), lambda: text)
        for key, (size, value) in zip(encoded.tensors, made, strict=True):
            yield _entry(key, torch.float32, size, value)

    def _sent(self, name: str, rank: int, world: int) -> torch.Tensor:
        states = (Residuals(at, len(self.ranks), _read(name, sent)) for at, (sent, _) in enumerate(self.ranks))
        return resized(states, rank, world).sent[name]

    def _returned(self, name: str, rank: int, world: int) -> torch.Tensor:
        states = (Residuals(at, len(self.ranks), {}, _read(name, own)) for at, (_, own) in enumerate(self.ranks))
        return resized(states, rank, world).returned[name]


def _length(total: int, rank: int, world: int) -> int:
    lo, hi = slice_of(total, rank, world)
    return hi - lo


def _read(name: str, entries: Mapping[str, TableEntry]) -> dict[str, torch.Tensor]:
    found = entries.get(name)
    return {} if found is None else {name: found.read(Box.whole(found.info.shape)).view(-1).float()}


def _residuals(table: Table, rank: int) -> tuple[int, Mapping[str, TableEntry], Mapping[str, TableEntry]]:
    """Return the number of ranks that saved, and the entries of the residuals of one of them."""
    where = f"{table.where}: {_OBJECT}{rank}"
    entry = table.entries.get((f"{_OBJECT}{rank}", "object"))
    if entry is None:
        raise FormatError(f"{where}: the residuals of rank {rank} are missing")
    named = _Named(table.entries)
    try:
        value = json.loads(bytes(entry.read(Box.whole(entry.info.shape)).numpy()))
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{where}: not JSON ({err})") from None
    found = Residuals.from_object(objects.decode(value, tensors=named, where=where).value)
    if found.rank != rank or not 0 < found.world <= len(table.entries):
        raise FormatError(f"{where}: are those of rank {found.rank} of {found.world}, expected rank {rank}")

    def entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TableEntry]:
        return {name: table.entries[named.keys_of[id(tensor)], "object"] for name, tensor in tensors.items()}

    return found.world, entries(found.sent), entries(found.returned)


def _entry(key: str, dtype: torch.dtype, size: int, value: Callable[[], torch.Tensor]) -> TableEntry:
    def read(box: Box) -> torch.Tensor:
        return value()[box.slices()]

    return TableEntry(TensorInfo(key, "object", name_of(dtype), (size,), "object"), read, "residuals")
