"""A column of integers that grows, in a type as narrow as its values allow."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_ROWS = 1 << 17  # of a segment


class GrowingColumn:
    """Integers that are appended in parts and then read once.

    A segment is a memory map of its own. The heap would keep the memory of segments that have been read, because segments
    of other columns are between them.
    """

    def __init__(self, dtype: npt.DTypeLike = np.uint16) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)  # the widest so far
        self._segments: list[npt.NDArray[Any]] = []
        self._free = 0

    def extend(self, values: npt.NDArray[np.integer[Any]]) -> None:
        """Append int64 values, or values of the dtype of the column."""
        if not len(values):
            return
        if values.dtype == np.int64:
            self._widen(int(values.min()), int(values.max()))
        while len(values):
            if not self._free:
                self._segments.append(_memory(self.dtype))
                self._free = _ROWS
            part = values[: self._free]
            at = _ROWS - self._free
            self._segments[-1][at : at + len(part)] = part
            self._free -= len(part)
            values = values[len(part) :]

    def _widen(self, least: int, largest: int) -> None:
        """Make room for a range of values in the segments to come, and in the last one."""
        if least < 0 and self.dtype.kind == "u":
            kind: Any = np.int32 if largest < 2**31 and least >= -(2**31) and self.dtype != np.uint32 else np.int64
        elif largest > np.iinfo(self.dtype).max or least < np.iinfo(self.dtype).min:
            kind = np.uint32 if self.dtype.kind == "u" and largest < 2**32 else np.int64
        else:
            return
        self.dtype = np.dtype(kind)
        if self._free:
            old = self._segments.pop()
            self._segments.append(_memory(self.dtype))
            used = _ROWS - self._free
            self._segments[-1][:used] = old[:used]

    def segments(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the values and release them."""
        self._segments.reverse()
        while self._segments:
            segment = self._segments.pop()
            yield segment[: _ROWS - self._free] if not self._segments else segment


def _memory(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.frombuffer(mmap.mmap(-1, _ROWS * dtype.itemsize), dtype)
    return found
