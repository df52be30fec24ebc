"""Arithmetic or exponential mean of several checkpoints of one model.

Only weights are averaged, as in torch.optim.swa_utils. The optimizer is dropped, because the mean of moments is not the
moment of the mean. If there are masters, they are averaged, and weights are cast from them; weights that differ from the cast
are averaged directly. Buffers and tensors that are not floating point come from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unickpt.base.errors import ConfigError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.readings import Reading
from unickpt.transform.edit.cast import is_float
from unickpt.transform.edit.table import Table, TableEntry, TensorKey, count_of


@dataclass(frozen=True, slots=True)
class Average:
    """Mean of several tables.

    Attributes:
        decay: decay of an exponential mean in the order of the checkpoints, ``m = decay * m + (1 - decay) * x``, starting
            with the first one. None: arithmetic mean.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"decay is {self.decay:g}, expected a value between 0 and 1")

    def of(self, tables: Sequence[Table]) -> Table:
        """Return the mean. Non-tensor state comes from the last table.

        Raises:
            MismatchError: the tables have different models, or there are fewer than two.
        """
        if len(tables) < 2:
            raise MismatchError(f"a mean needs two or more checkpoints, found {count_of(len(tables), 'checkpoint')}")
        identities = [table.identity for table in tables]
        for at, table in enumerate(tables):
            if table.identity in identities[:at]:
                raise MismatchError(f"{table.where}: is listed twice")
            _check_same_model(tables[0], table)
        last = tables[-1]
        if last.model_files is None:
            other = next((table for table in tables if table.model_files is not None), last)
            last = replace(last, model_files=other.model_files, described=other.described)
        entries = [self._mean(tables, entry) for entry in last.tensors() if entry.info.kind != "optimizer"]
        count = sum(entry.origin.startswith("mean") for entry in entries)
        states = len(last.tensors()) - len(entries)
        how = "mean" if self.decay is None else f"exponential mean (decay {self.decay:g})"
        after = replace(
            last.with_entries(entries, optimizer=None),
            identity=tuple(each for table in tables for each in table.identity),
            inputs=tuple(each for table in tables for each in table.inputs),
        ).with_done(
            f"{how} of {len(tables)} checkpoints, of steps {', '.join(str(table.step) for table in tables)}: {count_of(count)}"
        )
        if len(entries) > count:
            after = after.with_done(f"{count_of(len(entries) - count)} (buffers, not floating point) from the last checkpoint")
        line = f"the optimizer: {count_of(states, 'state')}, its hyperparameters and steps; moments cannot be averaged"
        return after.with_left_out(line) if states or last.optimizer is not None else after

    def _mean(self, tables: Sequence[Table], entry: TableEntry) -> TableEntry:
        info = entry.info
        if info.kind == "buffer" or not is_float(info.dtype):
            return entry
        every = [table.entries[info.key] for table in tables]
        how = f"mean of {len(tables)}"
        read = self._read([each.read for each in every], info.dtype)
        if info.derived_from is None:
            return replace(entry, read=read, origin=how)
        parents = [table.entries[info.name, info.derived_from] for table in tables]
        masters = self._read([each.read for each in parents], parents[-1].info.dtype)
        own = [box for each in every for box in each.overrides]
        derived = _with_own(masters, read, own, info.dtype)
        return replace(entry, read=derived, origin=how, overrides=(Box.whole(info.shape),) if own else ())

    def _read(self, readings: Sequence[Reading], dtype: str) -> Reading:
        """Return the reading of the mean, computed in float64 in the order of the checkpoints."""

        def mean(box: Box) -> torch.Tensor:
            total = readings[0](box).double()
            for read in readings[1:]:
                if self.decay is None:
                    total += read(box).double()
                else:
                    total.mul_(self.decay).add_(read(box).double().mul_(1 - self.decay))
            return (total / len(readings) if self.decay is None else total).to(torch_dtype(dtype))

        return mean


def _with_own(masters: Reading, weights: Reading, own: Sequence[Box], dtype: str) -> Reading:
    """Return the reading of a weight: the cast of the mean of the masters, and in the boxes ``own`` the mean of the weights."""

    def read(box: Box) -> torch.Tensor:
        found = masters(box).to(torch_dtype(dtype)).view(box.shape)
        for part in (each.intersect(box) for each in own):
            if part is not None:
                found[part.within(box).slices()] = weights(part).view(part.shape)
        return found.reshape(-1)

    return read


def _check_same_model(first: Table, other: Table) -> None:
    """Raise MismatchError unless two tables have the same model."""
    both = f"{first.where} and {other.where}"
    if first.writer.dialect != other.writer.dialect:
        raise MismatchError(f"{both} have different dialects ({first.writer.dialect} and {other.writer.dialect})")
    one, two = _shapes(first), _shapes(other)
    more = sorted(one.keys() ^ two.keys())
    if more:
        where = first.where if more[0] in one else other.where
        names = some((f"{name} ({state})" for name, state in more), 4)
        raise MismatchError(f"{both} have different models: only one of them has {names} (the first is in {where})")
    for key, (shape, derived) in one.items():
        if shape != two[key][0]:
            raise MismatchError(
                f"{both} have different models: {key[0]} has shape {list(shape)} in the first, "
                f"{list(two[key][0])} in the second"
            )
        if derived != two[key][1]:
            raise MismatchError(f"{both}: only one of them derives {key[0]} from its {derived or two[key][1]}")
    if dict(first.aliases) != dict(other.aliases):
        raise MismatchError(f"{both}: their tied parameters differ")


def _shapes(table: Table) -> dict[TensorKey, tuple[tuple[int, ...], str | None]]:
    return {
        entry.info.key: (entry.info.shape, entry.info.derived_from)
        for entry in table.tensors()
        if entry.info.kind != "optimizer"
    }
