"""The index: the table of all fragments of a checkpoint.

It has one numpy array per field, so a query over a million fragments is a few vectorised operations.
``rank_rows.py`` merges it from the rows of the ranks, ``index_codec.py`` writes and reads it.

All elements of all tensors have one linear order: tensor after tensor in the order of the table, each in
row-major order. Fragments are sorted by the position of their first element in that order, so fragments that
can overlap are close together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.errors import CoverageError, FormatError
from unickpt.format.boxes import Box, Ints, find_overlap
from unickpt.format.dtypes import itemsize_bytes

MAX_NDIM = 32
KINDS = ("parameter", "buffer", "optimizer", "object")
_BLOCK_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A named global tensor of a checkpoint.

    Attributes:
        name: fully qualified parameter or buffer name.
        state: ``weight``, ``master``, or the optimizer's own key (``exp_avg``, ...).
        dtype: format dtype name of the stored (or, if derived, of the restored) elements.
        shape: global shape.
        kind: one of ``KINDS``.
        derived_from: None for a stored tensor. A derived tensor is the cast of this state of the same name.
            It may still have fragments, which override the cast where the job held other values.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    derived_from: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.state)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * itemsize_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """One fragment to be indexed: its tensor, its box, the position of its bytes in the file and their checksum."""

    tensor: TensorInfo
    box: Box
    offset_bytes: int
    checksum: int


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
        if sum(info.numel for info in tensors) >= 2**62:
            raise FormatError(f"the {len(tensors)} tensors of the index have 2**62 elements or more in total")
        lengths = np.array([len(info.shape) for info in tensors], np.int64)
        widest = max(int(lengths.max(initial=0)), ndim)
        extents = np.ones((len(tensors), widest), np.int64)
        values = np.fromiter(itertools.chain.from_iterable(info.shape for info in tensors), np.int64, int(lengths.sum()))
        extents[np.arange(widest) < lengths[:, None]] = values
        strides = np.ones_like(extents)
        for dim in range(widest - 2, -1, -1):
            strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
        first = np.zeros(len(tensors) + 1, np.int64)
        np.cumsum(extents.prod(axis=1), out=first[1:])
        return cls(first, np.ascontiguousarray(strides[:, :ndim]), np.ascontiguousarray(extents[:, :ndim]))

    def positions(self, tensor: npt.NDArray[np.integer[Any]], at: Ints) -> Ints:
        """Return the int64 ``[n]`` positions of elements, given by tensor number ``[n]`` and index ``[n, ndim]``."""
        out = np.empty(len(tensor), np.int64)
        for part in blocks(len(tensor)):
            ids = tensor[part]
            place = self.first[ids]
            for dim in range(at.shape[1]):
                place += at[part, dim] * self.strides[ids, dim]
            out[part] = place
        return out


def blocks(count: int) -> Iterator[slice]:
    """Yield slices of ``range(count)`` so small that intermediate arrays stay in the processor's cache."""
    for lo in range(0, count, _BLOCK_ROWS):
        yield slice(lo, min(lo + _BLOCK_ROWS, count))


@dataclass(frozen=True)
class Index:
    """Tensors, files and fragments of a checkpoint.

    Attributes:
        tensors: sorted by (name, state), keys unique.
        files: data file paths relative to the checkpoint directory.
        tensor, file: int32 ``[n]``, positions in ``tensors`` and ``files``.
        offset_bytes: int64 ``[n]``, absolute position of the fragment's first byte in its file.
        checksum: uint64 ``[n]``, xxh3_64 of the fragment's bytes.
        start, shape: int64 ``[n, ndim]``, the boxes. A tensor with fewer dimensions is padded with trailing
            dimensions ``start 0, shape 1``. Rows are sorted by (tensor, start). The memory is in Fortran
            order, because the code works on one dimension at a time.
    """

    tensors: tuple[TensorInfo, ...]
    files: tuple[str, ...]
    tensor: npt.NDArray[np.int32]
    file: npt.NDArray[np.int32]
    offset_bytes: Ints
    checksum: npt.NDArray[np.uint64]
    start: Ints
    shape: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def order(self) -> LinearOrder:
        """The linear order that this index is sorted by."""
        return LinearOrder.of(self.tensors, self.start.shape[1])

    def ids(self) -> dict[tuple[str, str], int]:
        """Return the position of every (name, state) in ``tensors``."""
        return {info.key: position for position, info in enumerate(self.tensors)}

    def rows_of(self, tensor_id: int) -> range:
        """Return the (consecutive) rows of the fragments of one tensor."""
        lo, hi = np.searchsorted(self.tensor, [tensor_id, tensor_id + 1])
        return range(int(lo), int(hi))

    def counts(self) -> Ints:
        """Return int64 ``[t]``: the number of fragments of every tensor."""
        return np.bincount(self.tensor, minlength=len(self.tensors))

    @cached_property
    def same_boxes(self) -> npt.NDArray[np.bool_]:
        """bool ``[t]``: whether a tensor has the same boxes in the same files as the tensor before it."""
        counts, extents = self.counts(), self.order.extents
        same = np.zeros(len(counts), bool)
        same[1:] = (counts[1:] == counts[:-1]) & (counts[1:] > 0) & (extents[1:] == extents[:-1]).all(axis=1)
        same[1:] &= np.array([a.shape == b.shape for a, b in itertools.pairwise(self.tensors)], bool)
        rows = np.flatnonzero(np.repeat(same, counts))
        columns = [self.file, *self.start.T, *self.shape.T]
        for part in blocks(len(rows)):
            tensor = self.tensor[rows[part]]
            before = rows[part] - counts[tensor]
            for column in columns:
                same[tensor[column[rows[part]] != column[before]]] = False
        return same

    def own_boxes(self) -> npt.NDArray[np.bool_]:
        """Return bool ``[n]``: the rows of tensors for which ``same_boxes`` is False."""
        return np.repeat(~self.same_boxes, self.counts())

    def box(self, row: int) -> Box:
        """Return the box of one row without the padding dimensions."""
        ndim = len(self.tensors[int(self.tensor[row])].shape)
        return Box(tuple(self.start[row, :ndim].tolist()), tuple(self.shape[row, :ndim].tolist()))

    def numel(self) -> Ints:
        """Return int64 ``[n]``: the number of elements of every fragment."""
        return volumes(self.shape)

    def size_bytes(self) -> Ints:
        """Return int64 ``[n]``: the size of every fragment in bytes."""
        sizes = np.array([itemsize_bytes(t.dtype) for t in self.tensors] or [0], np.int64)
        found = self.numel()
        for part in blocks(len(found)):
            found[part] *= sizes[self.tensor[part]]
        return found


def volumes(shape: Ints) -> Ints:
    """Return int64 ``[n]``: the number of elements of boxes with the extents ``[n, ndim]``."""
    count = np.ones(len(shape), np.int64)
    for dim in range(shape.shape[1]):
        count *= shape[:, dim]
    return count


def check_boxes(
    tensors: Sequence[TensorInfo],
    linear: LinearOrder,
    tensor: npt.NDArray[np.integer[Any]],
    start: Ints,
    shape: Ints,
    where: str,
) -> None:
    """Check that boxes are not empty, lie in their tensors and are sorted.

    Args:
        tensors, linear: the table of tensors and its order.
        tensor: int ``[n]``, ascending, the tensor number of every box.
        start, shape: int64 ``[n, ndim]``, the boxes.
        where: name of the file in messages.

    Raises:
        FormatError: a box violates this; the message names the first such fragment.
    """
    ndim = start.shape[1]
    wide = np.array([at for at, info in enumerate(tensors) if len(info.shape) > ndim], tensor.dtype)
    for at in wide[np.searchsorted(tensor, wide) < np.searchsorted(tensor, wide, side="right")].tolist():
        info = tensors[at]
        raise FormatError(f"{where}: fragments of {info.name!r} have {ndim} dimensions, expected {len(info.shape)}")
    for part in blocks(len(tensor)):
        ids = tensor[part]
        inside = np.ones(len(ids), bool)
        for dim in range(ndim):
            limit, begin, extent = linear.extents[ids, dim], start[part, dim], shape[part, dim]
            inside &= (begin >= 0) & (extent > 0) & (begin <= limit) & (extent <= limit - begin)
        if not inside.all():
            row = part.start + int(np.argmin(inside))
            info = tensors[int(tensor[row])]
            raise FormatError(f"{where}: fragment {row} of {info.name!r} is empty or leaves its tensor of shape {info.shape}")
    position = linear.positions(tensor, start)
    if np.any(position[1:] < position[:-1]):
        raise FormatError(f"{where}: fragments are not sorted by tensor and start")


def check_complete(index: Index) -> None:
    """Check that the fragments of every stored tensor have as many elements as the tensor, and that derived ones have a source.

    Every load runs it: it takes one pass over the columns and one over the tensors. It does not detect
    overlaps; ``check_coverage`` and the read plan do.

    Raises:
        CoverageError: a tensor is incomplete; the message names it.
    """
    covered = np.zeros(len(index.tensors), np.int64)
    np.add.at(covered, index.tensor, index.numel())
    states = {info.key: info for info in index.tensors}
    for info, count in zip(index.tensors, covered.tolist(), strict=True):
        if info.derived_from is not None:
            source = states.get((info.name, info.derived_from))
            if source is None or source.derived_from is not None:
                raise CoverageError(f"{info.name} ({info.state}) is derived from {info.derived_from}, which is not stored")
            if source.shape != info.shape:
                raise CoverageError(
                    f"{info.name} ({info.state}) of shape {info.shape} is derived from {source.state} of shape {source.shape}"
                )
        elif count != info.numel:
            raise CoverageError(
                f"{info.name} ({info.state}) of shape {info.shape}: fragments cover {count} of {info.numel} elements"
            )


def _rows(boxes: Ints, rows: Ints) -> Ints:
    """Return some rows of an array ``[n, ndim]``, in Fortran order."""
    return np.stack([column[rows] for column in boxes.T], axis=1) if boxes.shape[1] else boxes[rows]


def check_coverage(index: Index) -> None:
    """Check that fragments cover every stored tensor exactly once and every derived one at most once.

    Raises:
        CoverageError: a tensor has a hole or two overlapping fragments; the message names the tensor and both boxes.
    """
    rows = np.flatnonzero(index.own_boxes())
    clash = find_overlap(_rows(index.start, rows), _rows(index.shape, rows), index.tensor[rows])
    if clash is not None:
        a, b = (index.box(int(rows[at])) for at in sorted(clash))
        info = index.tensors[int(index.tensor[rows[clash[0]]])]
        raise CoverageError(f"{info.name} ({info.state}): fragments {a} and {b} overlap")
    check_complete(index)
