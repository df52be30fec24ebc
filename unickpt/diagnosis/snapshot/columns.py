"""Records of several ranks as columns, so that one pass of numpy covers all ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.diagnosis.recording.records import RECORD, Records

AT = "at"  # of a record: position of its rank, besides the columns of ``RECORD``
_KEY_BITS = 62


class Columns:
    """Records in the order of their ranks, the oldest of each rank first.

    ``columns["op"]`` is the column of that name of ``RECORD``, contiguous, ``[n]``; ``columns[AT]`` is the position of the
    rank of each record in ``ranks``, int64 ``[n]``. A column is made when it is first asked for.

    Attributes:
        ranks: global ranks, int64 ``[r]``.
    """

    def __init__(self, ranks: Ints, count: int, load: Callable[[str], npt.NDArray[Any]]) -> None:
        self.ranks, self._count, self._load = ranks, count, load
        self._known: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._load(name)
        return found

    def take(self, places: npt.NDArray[np.intp]) -> Columns:
        """Return the records at ascending places, of the same ranks."""
        return Columns(self.ranks, len(places), lambda name: self[name][places])

    def where(self, wanted: npt.NDArray[np.bool_]) -> Columns:
        """Return the records for which ``wanted``, ``[n]``, is true, of the same ranks."""
        return self if wanted.all() else self.take(np.flatnonzero(wanted))


def columns_of(records: Mapping[int, Records]) -> Columns:
    """Return the records of ranks, the oldest of each first, by their global numbers."""
    parts = list(records.values())
    counts = [len(part) for part in parts]

    def load(name: str) -> npt.NDArray[Any]:
        if name == AT:
            return np.repeat(np.arange(len(parts)), counts)
        return np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, RECORD[name])

    return Columns(np.fromiter(records, np.int64, len(records)), sum(counts), load)


def newest_places(at: Ints, count: int, ranks: int) -> Ints:
    """Return the places of the last ``count`` of each rank.

    Args:
        at: position of the rank of each record, ascending, ``[n]``.
        count: how many of each.
        ranks: number of ranks.
    """
    ends = np.cumsum(np.bincount(at, minlength=ranks))
    found: Ints = np.flatnonzero(ends[at] - np.arange(len(at)) <= count)
    return found


def largest(at: Ints, values: Ints, ranks: int) -> Ints:
    """Return int64 ``[ranks]``: the place of the first largest of the values, ``[n]``, of each rank; -1 without any.

    Args:
        at: position of the rank of each value, ``[n]``.
        values: int64 ``[n]``.
        ranks: number of ranks.
    """
    most = np.full(ranks, np.iinfo(np.int64).min)
    np.maximum.at(most, at, values)
    places = np.flatnonzero(values == most[at])[::-1]
    found = np.full(ranks, -1, np.int64)
    found[at[places]] = places  # of several, the last one that is assigned
    return found


class Timeline:
    """Order of moments of several ranks: by rank, then by time. Times of different ranks are never compared.

    Args:
        at: position of the rank of some times, ``[n]``.
        times: those times, int64 ``[n]``. The earliest positive one of a rank is the begin of its part.
        ranks: number of ranks.
    """

    def __init__(self, at: Ints, times: Ints, ranks: int) -> None:
        self._shift = _KEY_BITS - max(ranks, 1).bit_length()
        self._begin = np.full(ranks, np.iinfo(np.int64).max)
        known = times > 0
        np.minimum.at(self._begin, at[known], times[known])

    def keys(self, at: Ints, times: Ints) -> Ints:
        """Return int64 ``[n]``: numbers that are in the order of rank and time, and as far apart as times of a rank."""
        past = np.clip(times - self._begin[at], 0, (1 << self._shift) - 1)
        found: Ints = (at << self._shift) + past
        return found
