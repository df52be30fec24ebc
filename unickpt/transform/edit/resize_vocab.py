"""Step that changes the number of rows of the vocabulary, in all tensors with one row per entry and in all their states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from unickpt.base.errors import ConfigError, LanguageError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.megatron import keys
from unickpt.transform.convert.readings import Reading
from unickpt.transform.dialects.arrangement import Arrangement
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import dialects
from unickpt.transform.edit.cast import cast, is_float
from unickpt.transform.edit.patterns import Selection
from unickpt.transform.edit.table import Table, TableEntry, count_of

NewRows = Literal["mean", "zeros"]
AXIS = "vocab"  # name of the axis in dialects and facts
_BLOCK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Resize:
    """Remove rows at the end, or add rows.

    New rows of weights and masters are the mean of the old rows, computed in float64, or zeros. New rows of a derived weight
    are the cast of those of its master. New rows of optimizer states are zeros. Padding rows, beyond the vocabulary size in
    the checkpoint, are not part of the mean.

    Attributes:
        rows: new number of rows; 0 if ``multiple`` is given.
        multiple: round the number of rows up to a multiple of this number.
        fill: values of new rows.
        selection: tensors with a row per entry, if no dialect defines them.
        dim: dimension of the rows in the selected tensors.
    """

    rows: int = 0
    multiple: int = 0
    fill: NewRows = "mean"
    selection: Selection | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        if (self.rows > 0) == (self.multiple > 0) or min(self.rows, self.multiple) < 0:
            raise ConfigError(f"the number of rows is {self.rows or self.multiple}, expected a whole number above 0")

    def apply(self, table: Table) -> Table:
        dims = self._dims(table)
        shapes = {name: _shape(table, name) for name in dims}
        for name, dim in dims.items():
            if dim >= len(shapes[name]):
                raise MismatchError(f"{table.where}: {name} of shape {list(shapes[name])} has no dimension {dim}")
        counts = {shapes[name][dim] for name, dim in dims.items()}
        if len(counts) > 1:
            listed = some(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise MismatchError(f"{table.where}: the tensors of the vocabulary have different numbers of rows: {listed}")
        old = counts.pop()
        if not old:
            raise MismatchError(f"{table.where}: the vocabulary has no rows")
        new = self.rows or -(-old // self.multiple) * self.multiple
        model = Model.from_json(table.writer.model)
        real = min(model.facts.get("tokens", model.facts.get(AXIS, old)), old)
        entries: list[TableEntry] = []
        resized: dict[tuple[str, str], TableEntry] = {}
        for entry in sorted(table.tensors(), key=lambda each: each.info.derived_from is not None):  # masters first
            dim = dims.get(entry.info.name, -1)
            if dim < 0 or old == new or (entry.info.kind == "optimizer" and entry.info.numel <= 1):
                entries.append(entry)
                continue
            if entry.info.shape != shapes[entry.info.name]:
                raise MismatchError(
                    f"{table.where}: {entry.info.name} ({entry.info.state}) has shape {list(entry.info.shape)}, its parameter "
                    f"has {list(shapes[entry.info.name])}, so it cannot be resized; --drop '*:{entry.info.state}' removes it"
                )
            master = resized.get((entry.info.name, entry.info.derived_from or ""))
            found = _resized(entry, dim, new, real, "zeros" if entry.info.kind == "optimizer" else self.fill, master)
            resized[found.info.key] = found
            entries.append(found)
        how = f"{old:,} to {new:,} rows" + (f", new rows {self.fill}, in optimizer states zeros" if new > old else "")
        after = table.with_entries(entries, writer=replace(table.writer, model=_facts(table, model, old, new, bool(self.rows))))
        after = _configured(after, table, new)
        after = after.with_done(f"{count_of(len(dims), 'name')} ({some(sorted(dims))}), {count_of(len(resized))}: {how}")
        return after.with_left_out(f"the last {old - new:,} rows of the vocabulary") if new < old else after

    def _dims(self, table: Table) -> dict[str, int]:
        """Return the dimension of the rows of every tensor with one row per entry, by name."""
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
        if not found and own == keys.DIALECT:
            found = {name: 0 for name in table.names_of() if name.endswith(keys.VOCABULARY_TENSORS)}
        if not found:
            known = f"no dialect of the family {family!r} defines" if family else "the model family is unknown, which defines"
            raise LanguageError(
                f"{table.where}: {known} the tensors with a row per vocabulary entry; name them with --vocabulary-tensors"
            )
        return found


def _configured(after: Table, before: Table, rows: int) -> Table:
    """Return a table whose configuration has the new number of rows, if it described the table before."""
    files = before.model_files
    if files is None or before.shapes() != before.described:
        return after
    files = replace(files, settings={**files.settings, "vocab_size": rows})
    return replace(after, model_files=files, described=after.shapes())


def _dim_of(arrangement: Arrangement) -> int | None:
    for dim, node in enumerate(arrangement.dimensions):
        if AXIS in Arrangement((node,), "").axes():
            return dim
    return None


def _shape(table: Table, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter: of its weight, or else of its master."""
    states = {entry.info.state: entry.info.shape for entry in table.states(name)}
    found = states.get("weight", states.get("master"))
    if found is None:
        raise MismatchError(f"{table.where}: {name} has neither weight nor master")
    return found


def _facts(table: Table, model: Model, old: int, new: int, exact: bool) -> dict[str, Any]:
    """Return the facts of the resized model. If only the padding changes, the vocabulary size stays."""
    resized = {AXIS} if model.facts.get(AXIS) == old else set()
    if exact:  # with ``multiple``, new rows are padding and not entries of the tokenizer
        resized = {AXIS, "tokens"} & model.facts.keys()
    if not resized:
        return table.writer.model
    return {**table.writer.model, "facts": {**table.writer.model["facts"], **dict.fromkeys(resized, new)}}


def _resized(entry: TableEntry, dim: int, rows: int, real: int, fill: NewRows, master: TableEntry | None) -> TableEntry:
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
    overrides = tuple(part for box in entry.overrides if (part := box.intersect(kept)) is not None)
    was = entry.origin_after(f"{old:,} rows")
    return replace(
        entry, info=replace(info, shape=shape), read=_joined(entry.read, more, kept, dim), origin=was, overrides=overrides
    )


def _joined(read: Reading, more: Reading, kept: Box, dim: int) -> Reading:
    """Return the reading of the old rows followed by the new rows."""

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
    """Reading of rows that are the mean of the old rows, computed in float64 block by block at the first read."""

    def __init__(self, entry: TableEntry, dim: int, rows: int) -> None:
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
