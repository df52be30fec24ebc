"""Columns of the rows of many ranks, grouped by tensor."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.boxes import sort_order
from unickpt.checkpoint.format.linear_order import Column, blocks

FIELDS = 3  # of a row before its box: tensor, offset_bytes, checksum; then come the starts, then the shapes
_GROUPED_ROWS = 1 << 17
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


class RowColumns:
    """Columns of rows that arrive in parts, in types as narrow as their values allow.

    Attributes:
        count: number of rows.
        ndim: largest number of dimensions of a part.
    """

    def __init__(self) -> None:
        self.count = self.ndim = 0
        self._columns = {"tensor": GrowingColumn(), "offset": GrowingColumn(), "checksum": GrowingColumn(np.uint64)}
        self._order: Column = np.zeros(0, np.int32)

    def add(self, tensor: Ints, rows: Ints) -> None:
        """Append rows, int64 ``[k, 3 + 2 * ndim]``, and the numbers of their tensors ``[k]``."""
        count, ndim = len(rows), (rows.shape[1] - FIELDS) // 2
        for dim in range(self.ndim, ndim):
            self._columns[f"start.{dim}"], self._columns[f"shape.{dim}"] = GrowingColumn(), GrowingColumn()
            self._columns[f"start.{dim}"].extend(np.zeros(self.count, np.int64))
            self._columns[f"shape.{dim}"].extend(np.ones(self.count, np.int64))
        self.ndim = max(self.ndim, ndim)
        columns = np.ascontiguousarray(rows.T)
        self._columns["tensor"].extend(tensor)
        self._columns["offset"].extend(columns[1])
        self._columns["checksum"].extend(columns[2].view(np.uint64))
        for dim in range(self.ndim):
            known = dim < ndim
            self._columns[f"start.{dim}"].extend(columns[FIELDS + dim] if known else np.zeros(count, np.int64))
            self._columns[f"shape.{dim}"].extend(columns[FIELDS + ndim + dim] if known else np.ones(count, np.int64))
        self.count += count

    def group(self, position: npt.NDArray[np.int32], tensors: int) -> Ints:
        """Group the rows by tensor, each group in order of arrival: the order in which ``take`` returns the columns.

        Args:
            position: position of a tensor in the table by its number.
            tensors: number of tensors in the table.

        Returns:
            int64 ``[tensors]``, the number of rows of every tensor.
        """
        counts = np.zeros(tensors, np.int64)
        numbers = self._columns.pop("tensor").take()
        order: Column = np.empty(self.count, np.int32 if self.count < 2**31 else np.int64)
        groups = []
        for lo in range(0, self.count, _GROUPED_ROWS):
            key = position[numbers[lo : lo + _GROUPED_ROWS]]
            local = sort_order(key.astype(np.uint16) if tensors <= 1 << 16 else key)  # 16 bits have a faster sort
            order[lo : lo + len(key)] = local
            key = key[local]
            first = np.append(0, np.flatnonzero(key[1:] != key[:-1]) + 1)
            tensor, sizes = key[first], np.diff(first, append=len(key))
            counts[tensor] += sizes
            groups.append((lo, tensor, first, sizes))
        del numbers
        cursor = np.cumsum(counts) - counts
        self._order = np.empty_like(order)
        for lo, tensor, first, sizes in groups:
            row = order[lo : lo + int(sizes.sum())] + lo
            self._order[np.arange(len(row)) + np.repeat(cursor[tensor] - first, sizes)] = row
            cursor[tensor] += sizes
        return counts

    def take(self, name: str) -> Column:
        """Return a whole column in the order of the groups, and release its memory."""
        return self.grouped(self._columns.pop(name).take())

    def grouped(self, column: Column) -> Column:
        """Return a column, given in order of arrival, in the order of the groups."""
        out = np.empty_like(column)
        for part in blocks(self.count):
            np.take(column, self._order[part], out=out[part], mode="clip")
        return out
