"""More or fewer rows of the vocabulary, in all tensors that have one for each entry, and in all their states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from unickpt import megatron_keys
from unickpt.converting import Reading
from unickpt.dtypes import torch_dtype
from unickpt.errors import ConfigError, LanguageError, MismatchError
from unickpt.fragments import Box, cut
from unickpt.language.arrangement import Arrangement
from unickpt.language.facts import Model
from unickpt.language.shipped import dialects
from unickpt.surgery.casting import cast, is_float
from unickpt.surgery.selecting import Selection
from unickpt.surgery.table import Entry, Table, count_of, some_of

Fill = Literal["mean", "zeros"]
AXIS = "vocab"  # as dialects and facts name it
_BLOCK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Resize:
    """Cut rows off, or add some.

    New rows of weights and masters are the mean of the old ones, in float64 (or zeros); of a derived weight, the cast of its
    master's. New rows of the optimizer's states are zeros. Rows that are but padding (beyond the vocabulary that the
    checkpoint tells of) are not in the mean.

    Attributes:
        rows: that there shall be; 0 if ``multiple`` tells.
        multiple: of which there shall be the next one.
        fill: what new rows are.
        selection: of tensors, where no dialect tells; each with its rows in dimension ``dim``.
    """

    rows: int = 0
    multiple: int = 0
    fill: Fill = "mean"
    selection: Selection | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        if (self.rows > 0) == (self.multiple > 0) or min(self.rows, self.multiple) < 0:
            raise ConfigError(f"a vocabulary of {self.rows or self.multiple} rows: a whole number above 0 is wanted")

    def apply(self, table: Table) -> Table:
        dims = self._dims(table)
        shapes = {name: _shape(table, name) for name in dims}
        for name, dim in dims.items():
            if dim >= len(shapes[name]):
                raise MismatchError(f"{table.where}: {name} of shape {list(shapes[name])} has no dimension {dim}")
        counts = {shapes[name][dim] for name, dim in dims.items()}
        if len(counts) > 1:
            told = some_of(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise MismatchError(f"{table.where}: the tensors of the vocabulary have different numbers of rows: {told}")
        old = counts.pop()
        if not old:
            raise MismatchError(f"{table.where}: the vocabulary has no rows")
        new = self.rows or -(-old // self.multiple) * self.multiple
        model = Model.from_json(table.writer.model)
        real = min(model.facts.get("tokens", model.facts.get(AXIS, old)), old)
        entries: list[Entry] = []
        resized: dict[tuple[str, str], Entry] = {}
        for entry in sorted(table.tensors(), key=lambda each: each.info.derived_from is not None):  # masters first
            dim = dims.get(entry.info.name, -1)
            if dim < 0 or old == new or (entry.info.kind == "optimizer" and entry.info.numel <= 1):
                entries.append(entry)
                continue
            if entry.info.shape != shapes[entry.info.name]:
                raise MismatchError(
                    f"{table.where}: {entry.info.name} ({entry.info.state}) is {list(entry.info.shape)}, its parameter "
                    f"{list(shapes[entry.info.name])}: it cannot be resized; --drop '*:{entry.info.state}' leaves it out"
                )
            master = resized.get((entry.info.name, entry.info.derived_from or ""))
            found = _resized(entry, dim, new, real, "zeros" if entry.info.kind == "optimizer" else self.fill, master)
            resized[found.info.key] = found
            entries.append(found)
        how = f"{old:,} to {new:,} rows" + (f", new ones {self.fill}, of the optimizer's states zeros" if new > old else "")
        after = table.with_entries(entries, writer=replace(table.writer, model=_facts(table, model, old, new, bool(self.rows))))
        after = after.did(f"{count_of(len(dims), 'name')} ({some_of(sorted(dims))}), {count_of(len(resized))}: {how}")
        return after.lost(f"the last {old - new:,} rows of the vocabulary") if new < old else after

    def _dims(self, table: Table) -> dict[str, int]:
        """Tensors with a row for each entry, and in which dimension."""
        if self.selection is not None:
            return {entry.info.name: self.dim for entry in self.selection.among(table)}
        own, model = table.writer.dialect, Model.from_json(table.writer.model)
        family = model.family
        found: dict[str, int] = {}
        for each in dialects():
            if family not in each.families or own not in (each.name, each.other):
                continue
            for rule in each.of_model(model.facts).rules:
                for item in (rule.here,) if own == each.name else rule.there:
                    dim = None if item.arrangement is None else _dim_of(item.arrangement)
                    if dim is not None:
                        for name, names in table.names_of().items():
                            if any(item.name.match(every) is not None for every in names):
                                found.setdefault(name, dim)
        if not found and own == megatron_keys.DIALECT:
            found = {name: 0 for name in table.names_of() if name.endswith(megatron_keys.VOCABULARY_TENSORS)}
        if not found:
            known = (
                f"no dialect of the family {family!r} tells" if family else "no family of models is told, and so nothing tells"
            )
            raise LanguageError(
                f"{table.where}: {known} which tensors have a row for each entry of it; --vocabulary-tensors says it"
            )
        return found


def _dim_of(arrangement: Arrangement) -> int | None:
    for dim, node in enumerate(arrangement.dimensions):
        if AXIS in Arrangement((node,), "").axes():
            return dim
    return None


def _shape(table: Table, name: str) -> tuple[int, ...]:
    """Of the parameter: of its weight, or its master."""
    states = {entry.info.state: entry.info.shape for entry in table.states(name)}
    found = states.get("weight", states.get("master"))
    if found is None:
        raise MismatchError(f"{table.where}: {name} has neither weight nor master")
    return found


def _facts(table: Table, model: Model, old: int, new: int, told: bool) -> dict[str, Any]:
    """Of the model after it. A vocabulary that was padded keeps its size, if only the padding is another one."""
    resized = {AXIS} if model.facts.get(AXIS) == old else set()
    if told:  # rows that are added as padding are no entries of the tokenizer
        resized = {AXIS, "tokens"} & model.facts.keys()
    if not resized:
        return table.writer.model
    return {**table.writer.model, "facts": {**table.writer.model["facts"], **dict.fromkeys(resized, new)}}


def _resized(entry: Entry, dim: int, rows: int, real: int, fill: Fill, master: Entry | None) -> Entry:
    info = entry.info
    old = info.shape[dim]
    shape = (*info.shape[:dim], rows, *info.shape[dim + 1 :])
    kept = Box.whole((*shape[:dim], min(old, rows), *shape[dim + 1 :]))
    more: Reading
    if master is not None:
        more = cast(master.read, info.dtype)
    elif fill == "mean" and is_float(info.dtype):
        more = _Mean(entry, dim, real)
    else:
        more = _zeros(info.dtype)
    differs = tuple(part for box in entry.differs if (part := box.intersect(kept)) is not None)
    was = entry.told(f"{old:,} rows")
    return replace(entry, info=replace(info, shape=shape), read=_joined(entry.read, more, kept, dim), was=was, differs=differs)


def _joined(read: Reading, more: Reading, kept: Box, dim: int) -> Reading:
    """Old rows, and new ones behind them."""

    def joined(box: Box) -> torch.Tensor:
        lo, end, limit = box.start[dim], box.stop[dim], kept.shape[dim]
        if end <= limit:
            return read(box)
        if lo >= limit:
            return more(box)
        first, last = _rows(box, dim, lo, limit), _rows(box, dim, limit, end)
        return torch.cat([read(first).view(first.shape), more(last).view(last.shape)], dim).reshape(-1)

    return joined


def _rows(box: Box, dim: int, lo: int, hi: int) -> Box:
    start, shape = list(box.start), list(box.shape)
    start[dim], shape[dim] = lo, hi - lo
    return Box(tuple(start), tuple(shape))


def _zeros(dtype: str) -> Callable[[Box], torch.Tensor]:
    return lambda box: torch.zeros(box.numel, dtype=torch_dtype(dtype))


class _Mean:
    """Rows that are all the mean of old ones; summed in float64 when the first of them is wanted, some at a time."""

    def __init__(self, entry: Entry, dim: int, rows: int) -> None:
        self._entry, self._dim, self._count = entry, dim, rows
        self._mean: torch.Tensor | None = None
        self._lock = threading.Lock()

    def __call__(self, box: Box) -> torch.Tensor:
        with self._lock:
            if self._mean is None:
                self._mean = self._made()
        one = _rows(box, self._dim, 0, 1)
        return self._mean[one.slices()].expand(box.shape).reshape(-1).clone()

    def _made(self) -> torch.Tensor:
        info, dim = self._entry.info, self._dim
        total = torch.zeros(_rows(Box.whole(info.shape), dim, 0, 1).shape, dtype=torch.float64)
        for box in cut(_rows(Box.whole(info.shape), dim, 0, self._count), _BLOCK_ELEMENTS) if total.numel() else ():
            total[_rows(box, dim, 0, 1).slices()] += self._entry.read(box).view(box.shape).double().sum(dim, keepdim=True)
        return (total / self._count).to(torch_dtype(info.dtype))
