"""The mean of several checkpoints of one model: of all the same, or exponential.

It is of weights alone, as of torch.optim.swa_utils: the moments of a mean are not the mean of moments, so the optimizer is
left out. Where there are masters, they are averaged, and weights are their cast; where a checkpoint held something else than
the cast, weights are averaged themselves. Buffers, and tensors that are not floating point, are the last one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unickpt.converting import Reading
from unickpt.dtypes import torch_dtype
from unickpt.errors import ConfigError, MismatchError
from unickpt.fragments import Box
from unickpt.surgery.casting import is_float
from unickpt.surgery.table import Entry, Key, Table, count_of, some_of


@dataclass(frozen=True, slots=True)
class Average:
    """How many are averaged, and how.

    Attributes:
        decay: of an exponential mean in the order of the checkpoints, m = decay * m + (1 - decay) * x, beginning with the
            first one; None: all count the same.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"a decay of {self.decay:g}: it is between 0 and 1")

    def of(self, tables: Sequence[Table]) -> Table:
        """The mean; what is no tensor is the last one's.

        Raises:
            MismatchError: they are not of one model, or only one is there.
        """
        if len(tables) < 2:
            raise MismatchError(f"{count_of(len(tables), 'checkpoint')}: a mean is of two or more")
        identities = [table.identity for table in tables]
        for at, table in enumerate(tables):
            if table.identity in identities[:at]:
                raise MismatchError(f"{table.where}: is there twice")
            _check_alike(tables[0], table)
        last = tables[-1]
        entries = [self._mean(tables, entry) for entry in last.tensors() if entry.info.kind != "optimizer"]
        count = sum(entry.was.startswith("mean") for entry in entries)
        states = len(last.tensors()) - len(entries)
        how = "mean" if self.decay is None else f"exponential mean (decay {self.decay:g})"
        after = replace(
            last.with_entries(entries, optimizer=None),
            identity=tuple(each for table in tables for each in table.identity),
            inputs=tuple(each for table in tables for each in table.inputs),
        ).did(
            f"{how} of {len(tables)} checkpoints, of steps {', '.join(str(table.step) for table in tables)}: {count_of(count)}"
        )
        if len(entries) > count:
            after = after.did(f"{count_of(len(entries) - count)} (buffers, and what is not floating point) of the last one")
        told = f"the optimizer: {count_of(states, 'state')}, its hyperparameters and steps; means of moments are no moments"
        return after.lost(told) if states or last.optimizer is not None else after

    def _mean(self, tables: Sequence[Table], entry: Entry) -> Entry:
        info = entry.info
        if info.kind == "buffer" or not is_float(info.dtype):
            return entry
        every = [table.entries[info.key] for table in tables]
        how = f"mean of {len(tables)}"
        read = self._read([each.read for each in every], info.dtype)
        if info.derived_from is None:
            return replace(entry, read=read, was=how)
        parents = [table.entries[info.name, info.derived_from] for table in tables]
        masters = self._read([each.read for each in parents], parents[-1].info.dtype)
        own = [box for each in every for box in each.differs]
        derived = _with_own(masters, read, own, info.dtype)
        return replace(entry, read=derived, was=how, differs=(Box.whole(info.shape),) if own else ())

    def _read(self, readings: Sequence[Reading], dtype: str) -> Reading:
        """Of float64 sums, in the order of the checkpoints."""

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
    """A weight: the cast of the masters' mean, but in some boxes the mean of weights."""

    def read(box: Box) -> torch.Tensor:
        found = masters(box).to(torch_dtype(dtype)).view(box.shape)
        for part in (each.intersect(box) for each in own):
            if part is not None:
                found[part.within(box).slices()] = weights(part).view(part.shape)
        return found.reshape(-1)

    return read


def _check_alike(first: Table, other: Table) -> None:
    """Two of one model. Raises MismatchError."""
    both = f"{first.where} and {other.where}"
    if first.writer.dialect != other.writer.dialect:
        raise MismatchError(f"{both} are of different dialects ({first.writer.dialect} and {other.writer.dialect})")
    one, two = _told(first), _told(other)
    more = sorted(one.keys() ^ two.keys())
    if more:
        where = first.where if more[0] in one else other.where
        names = some_of((f"{name} ({state})" for name, state in more), 4)
        raise MismatchError(f"{both} are not of one model: only in one of them: {names} (the first in {where})")
    for key, (shape, derived) in one.items():
        if shape != two[key][0]:
            raise MismatchError(
                f"{both} are not of one model: {key[0]} is {list(shape)} in the one, {list(two[key][0])} in the other"
            )
        if derived != two[key][1]:
            raise MismatchError(f"{both}: {key[0]} is told by its {derived or two[key][1]} in one of them alone")
    if dict(first.aliases) != dict(other.aliases):
        raise MismatchError(f"{both}: other parameters are tied in the one than in the other")


def _told(table: Table) -> dict[Key, tuple[tuple[int, ...], str | None]]:
    return {
        entry.info.key: (entry.info.shape, entry.info.derived_from)
        for entry in table.tensors()
        if entry.info.kind != "optimizer"
    }
