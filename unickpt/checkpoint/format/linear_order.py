"""The linear order of all elements of the tensors of an index, and helpers for columns of many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.tensor_info import TensorInfo
from unickpt.checkpoint.format.tensor_table import TensorTable

Column = npt.NDArray[np.integer[Any]]
BLOCK_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class LinearOrder:
    """Linear order of all elements of the tensors of a table.

    Attributes:
        first: int64 ``[t + 1]``, position of the first element of every tensor, and the end.
        strides, extents: int64 ``[t, ndim]``, in elements, row-major. Padded dimensions have extent 1.
    """

    first: Ints
    strides: Ints
    extents: Ints

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo], ndim: int) -> LinearOrder:
        """Return the order of a table. ``strides`` and ``extents`` omit dimensions beyond ``ndim``.

        Raises:
            FormatError: the tensors have 2**62 elements or more.
        """
        table = TensorTable.of(tensors)
        if table.total_numel() >= 2**62:
            raise FormatError(f"the {len(tensors)} tensors of the index have 2**62 elements or more in total")
        widest = max((len(form.shape) for form in table.forms), default=0)
        extents = np.ones((max(len(table.forms), 1), max(widest, ndim)), np.int64)
        for at, form in enumerate(table.forms):
            extents[at, : len(form.shape)] = form.shape
        strides = np.ones_like(extents)
        for dim in range(extents.shape[1] - 2, -1, -1):
            strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
        first = np.zeros(len(tensors) + 1, np.int64)
        np.cumsum(table.numel(), out=first[1:])
        return cls(first, strides[:, :ndim][table.form], extents[:, :ndim][table.form])

    def positions(self, tensor: Column, at: Sequence[Column] | Ints) -> Ints:
        """Return the int64 ``[n]`` positions of elements: tensors ``[n]``, and an index ``[n]`` for each dimension."""
        out = np.empty(len(tensor), np.int64)
        for part in blocks(len(tensor)):
            ids = tensor[part]
            place = self.first[ids]
            for dim, column in enumerate(at):
                place += column[part].astype(np.int64, copy=False) * self.strides[ids, dim]
            out[part] = place
        return out


def blocks(count: int) -> Iterator[slice]:
    """Yield slices of ``range(count)`` so small that intermediate arrays stay in the processor's cache."""
    for lo in range(0, count, BLOCK_ROWS):
        yield slice(lo, min(lo + BLOCK_ROWS, count))


def ranges(first: Ints, count: Ints) -> Ints:
    """Return the concatenated ranges ``first[i], ..., first[i] + count[i] - 1``."""
    found: Ints = np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first - (np.cumsum(count) - count), count)
    return found


def volumes(shape: Ints) -> Ints:
    """Return int64 ``[n]``: the number of elements of boxes with the extents ``[n, ndim]``."""
    count = np.ones(len(shape), np.int64)
    for dim in range(shape.shape[1]):
        count *= shape[:, dim]
    return count
