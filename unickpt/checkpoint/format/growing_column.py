"""A column of integers that grows, in a type as narrow as its values allow."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_ROWS, _ROWS = 1 << 14, 1 << 20  # of the first segment, and of the others
_HUGE_BYTES = 1 << 21


class GrowingColumn:
    """Integers that are appended in parts and then read once.

    A segment is a memory map of its own. The heap would keep the memory of segments that have been read, because segments
    of other columns are between them.
    """

    def __init__(self, dtype: npt.DTypeLike = np.uint16) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)  # the widest so far
        self._segments: list[npt.NDArray[Any]] = []
        self._free = 0  # rows of the last segment

    def extend(self, values: npt.NDArray[np.integer[Any]]) -> None:
        """Append int64 values, or values of the dtype of the column."""
        if not len(values):
            return
        if values.dtype == np.int64:
            self._widen(int(values.min()), int(values.max()))
        while len(values):
            if not self._free:
                self._free = _ROWS if self._segments else _FIRST_ROWS
                self._segments.append(_memory(self._free, self.dtype))
            segment = self._segments[-1]
            part = values[: self._free]
            at = len(segment) - self._free
            segment[at : at + len(part)] = part
            self._free -= len(part)
            values = values[len(part) :]

    def _widen(self, least: int, largest: int) -> None:
        """Make room for a range of values in the segments to come, and in the last one."""
        known = np.iinfo(self.dtype)
        if known.min <= least and largest <= known.max:
            return
        kinds = (np.uint32, np.int64) if self.dtype.kind == "u" else (np.int64,)
        self.dtype = np.dtype(next(kind for kind in kinds if np.iinfo(kind).min <= least and largest <= np.iinfo(kind).max))
        if self._free:
            old = self._segments.pop()
            new = _memory(len(old), self.dtype)
            new[: len(old) - self._free] = old[: len(old) - self._free]
            self._segments.append(new)

    def take(self) -> npt.NDArray[Any]:
        """Return all values and release the segments."""
        if self._segments:
            self._segments.append(self._segments.pop()[: -self._free or None])
        found = np.empty(sum(map(len, self._segments)), self.dtype)
        at = 0
        self._segments.reverse()
        while self._segments:
            segment = self._segments.pop()
            found[at : at + len(segment)] = segment
            at += len(segment)
        return found


def _memory(rows: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    memory = mmap.mmap(-1, rows * dtype.itemsize)
    if len(memory) >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    found: npt.NDArray[Any] = np.frombuffer(memory, dtype)
    return found
