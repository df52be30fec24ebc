"""The index: the table of all fragments of a checkpoint.

It has one numpy array per field, so a query over a million fragments is a few vectorised operations.
``rank_rows.py`` merges it from the rows of the ranks, ``index_codec.py`` writes and reads it.

All elements of all tensors have one linear order: tensor after tensor in the order of the table, each in
row-major order. Fragments are sorted by the position of their first element in that order, so fragments that
can overlap are close together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.errors import CoverageError, FormatError
from unickpt.checkpoint.format.boxes import Box, find_overlap
from unickpt.checkpoint.format.checksums import BLOCK_BYTES
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.linear_order import BLOCK_ROWS, Column, LinearOrder, blocks, ranges, volumes
from unickpt.checkpoint.format.tensor_info import KINDS as KINDS
from unickpt.checkpoint.format.tensor_info import MAX_NDIM as MAX_NDIM
from unickpt.checkpoint.format.tensor_info import TensorInfo as TensorInfo
from unickpt.checkpoint.format.tensor_table import TensorTable

_OVERLAP_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """One fragment to be indexed: its tensor, its box, the position of its bytes in the file and their checksum."""

    tensor: TensorInfo
    box: Box
    offset_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Some rows of an index.

    Attributes:
        tensor, file, offset_bytes: int64 ``[k]``, as in ``Index``.
        start, shape: int64 ``[k, ndim]``, the boxes.
        size_bytes: int64 ``[k]``, size of the fragment.
    """

    tensor: Ints
    file: Ints
    offset_bytes: Ints
    start: Ints
    shape: Ints
    size_bytes: Ints


@dataclass(frozen=True, eq=False)
class Index:
    """Tensors, files and fragments of a checkpoint.

    Fragments are rows, sorted by (tensor, start). Consecutive tensors with the same boxes in the same files share them, and
    the columns can have narrow types: an index of millions of fragments takes about as much memory as its file.
    ``take`` and the properties return wide columns with a value per fragment.

    Attributes:
        tensors: sorted by (name, state), keys unique.
        files: data file paths relative to the checkpoint directory.
        fragments: int64 ``[t]``, number of fragments of every tensor.
        same_boxes: bool ``[t]``: whether a tensor has the same boxes in the same files as the tensor before it.
        box_file: integers ``[m]``, position in ``files`` of every box; boxes of tensors with ``same_boxes`` are not repeated.
        box_start, box_shape: integers ``[m]`` for each dimension. A tensor with fewer dimensions is padded with trailing
            dimensions ``start 0, shape 1``.
        offset: integers ``[n]``, absolute position of the fragment's first byte in its file.
        checksum: uint64 ``[n]``, checksum of the fragment (``checksums.combined``).
        block_bytes: size of the blocks of the fragments, each with a checksum. 0: every fragment is one block (version 2).
    """

    tensors: TensorTable
    files: tuple[str, ...]
    fragments: Ints
    same_boxes: npt.NDArray[np.bool_]
    box_file: Column
    box_start: tuple[Column, ...]
    box_shape: tuple[Column, ...]
    offset: Column
    checksum: npt.NDArray[np.uint64]
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def of_rows(
        cls, tensors: Sequence[TensorInfo], files: Sequence[str], tensor: Column, file: Column, offset_bytes: Column,
        checksum: npt.NDArray[np.uint64], start: Ints, shape: Ints,
    ) -> Index:  # fmt: skip
        """Return the index of sorted fragments, each with a box of its own: ``[n]`` and ``[n, ndim]``."""
        table = TensorTable.of(tensors)
        counts = np.bincount(tensor, minlength=len(table)).astype(np.int64)
        none = np.zeros(len(table), bool)
        return cls(table, tuple(files), counts, none, file, tuple(start.T), tuple(shape.T), offset_bytes, checksum).shared()

    def shared(self) -> Index:
        """Return this index with boxes stored once where consecutive tensors have the same ones."""
        columns = (self.box_file, *self.box_start, *self.box_shape)
        found = like_previous(self.tensors, self.fragments, self.first_box, columns)
        found &= ~self.same_boxes
        if not found.any():
            return self
        same = self.same_boxes | found
        keep = np.repeat(~same, self.box_counts)
        file, *boxes = (column[keep] for column in columns)
        start, shape = tuple(boxes[: self.ndim]), tuple(boxes[self.ndim :])
        return replace(self, same_boxes=same, box_file=file, box_start=start, box_shape=shape)

    def __len__(self) -> int:
        return len(self.checksum)

    @property
    def ndim(self) -> int:
        return len(self.box_start)

    @cached_property
    def order(self) -> LinearOrder:
        """The linear order that this index is sorted by."""
        return LinearOrder.of(self.tensors, self.ndim)

    @cached_property
    def box_counts(self) -> Ints:
        """int64 ``[t]``: the number of boxes that a tensor does not share with the tensor before it."""
        return np.where(self.same_boxes, 0, self.fragments)

    @cached_property
    def first_row(self) -> Ints:
        """int64 ``[t + 1]``: first row of every tensor, and the number of rows."""
        return np.append(0, np.cumsum(self.fragments))

    @cached_property
    def first_box(self) -> Ints:
        """int64 ``[t]``: position of the first box of every tensor. Its boxes are consecutive."""
        own = np.maximum.accumulate(np.where(self.same_boxes, 0, np.arange(len(self.tensors))))
        return (np.cumsum(self.box_counts) - self.box_counts)[own]

    @cached_property
    def box_tensor(self) -> npt.NDArray[np.int32]:
        """int32 ``[m]``: the first tensor that has a box."""
        return np.repeat(np.arange(len(self.tensors), dtype=np.int32), self.box_counts)

    def ids(self) -> Mapping[tuple[str, str], int]:
        """Return the position of every (name, state) in ``tensors``."""
        return self.tensors.ids

    def rows_of(self, tensor_id: int) -> range:
        """Return the (consecutive) rows of the fragments of one tensor."""
        return range(int(self.first_row[tensor_id]), int(self.first_row[tensor_id + 1]))

    def box(self, row: int) -> Box:
        """Return the box of one row without the padding dimensions."""
        tensor = int(np.searchsorted(self.first_row, row, side="right")) - 1
        at = int(self.first_box[tensor]) + row - int(self.first_row[tensor])
        ndim = len(self.tensors.forms[int(self.tensors.form[tensor])].shape)
        start, shape = (tuple(int(column[at]) for column in part[:ndim]) for part in (self.box_start, self.box_shape))
        return Box(start, shape)

    def take(self, rows: Ints) -> IndexRows:
        """Return some rows, in the given order."""
        tensor = np.searchsorted(self.first_row, rows, side="right") - 1
        box = rows + self.to_box[tensor]
        start, shape = (_matrix([column[box] for column in part], len(box)) for part in (self.box_start, self.box_shape))
        size = volumes(shape) * self.itemsizes()[tensor]
        return IndexRows(tensor, self.box_file[box].astype(np.int64), self.offset[rows].astype(np.int64), start, shape, size)

    def itemsizes(self) -> Ints:
        """Return int64 ``[t]``: the size of an element of every tensor in bytes."""
        return np.array([itemsize_bytes(form.dtype) for form in self.tensors.forms] or [0], np.int64)[self.tensors.form]

    def box_numel(self) -> Ints:
        """Return int64 ``[m]``: the number of elements of every box."""
        found = np.ones(len(self.box_file), np.int64)
        for column in self.box_shape:
            found *= column.astype(np.int64, copy=False)
        return found

    @cached_property
    def to_box(self) -> Ints:
        """int64 ``[t]``: what is added to the number of a row to get the number of its box."""
        return self.first_box - self.first_row[:-1]

    def per_row(self, values: Ints, part: slice) -> Ints:
        """Return int64 ``[k]`` for a slice of the rows, from values ``[t]`` of their tensors."""
        first, last = (np.searchsorted(self.first_row, [part.start, part.stop], side="right") - 1).tolist()
        edges = np.clip(self.first_row[first : last + 2], part.start, part.stop)
        return np.repeat(values[first : last + 1], np.diff(edges))

    def boxes_of(self, part: slice | None = None) -> Ints:
        """Return int64 ``[n]``: the box of every row, or of a slice of the rows."""
        part = slice(0, len(self)) if part is None else part
        found: Ints = np.arange(part.start, part.stop) + self.per_row(self.to_box, part)
        return found

    @cached_property
    def tensor(self) -> npt.NDArray[np.int32]:
        """int32 ``[n]``: the tensor of every fragment."""
        return np.repeat(np.arange(len(self.tensors), dtype=np.int32), self.fragments)

    @cached_property
    def file(self) -> npt.NDArray[np.int32]:
        """int32 ``[n]``: the file of every fragment."""
        return self.box_file.astype(np.int32)[self.boxes_of()]

    @cached_property
    def offset_bytes(self) -> Ints:
        """int64 ``[n]``: position of the first byte of every fragment in its file."""
        return self.offset.astype(np.int64)

    @cached_property
    def start(self) -> Ints:
        """int64 ``[n, ndim]``: start of every fragment's box, in Fortran order."""
        box = self.boxes_of()
        return _matrix([column[box] for column in self.box_start], len(box))

    @cached_property
    def shape(self) -> Ints:
        """int64 ``[n, ndim]``: extents of every fragment's box, in Fortran order."""
        box = self.boxes_of()
        return _matrix([column[box] for column in self.box_shape], len(box))

    def numel(self) -> Ints:
        """Return int64 ``[n]``: the number of elements of every fragment."""
        return self.box_numel()[self.boxes_of()]

    def size_bytes(self) -> Ints:
        """Return int64 ``[n]``: the size of every fragment in bytes."""
        return self.numel() * np.repeat(self.itemsizes(), self.fragments)


def _matrix(columns: Sequence[Column], count: int) -> Ints:
    """Return columns ``[count]`` as int64 ``[count, ndim]``, in Fortran order."""
    out = np.empty((len(columns), count), np.int64)
    for target, column in zip(out, columns, strict=True):
        target[:] = column
    return out.T


def like_previous(tensors: TensorTable, counts: Ints, first: Ints, columns: Sequence[Column]) -> npt.NDArray[np.bool_]:
    """Find the tensors with the same boxes in the same files as the tensor before them.

    Args:
        tensors: ``t`` tensors.
        counts: int64 ``[t]``, number of boxes of every tensor.
        first: int64 ``[t]``, position of the first of its boxes.
        columns: file, starts and extents of the boxes.

    Returns:
        bool ``[t]``. A tensor without boxes is not alike.
    """
    shapes: dict[tuple[int, ...], int] = {}
    shape = np.array([shapes.setdefault(form.shape, len(shapes)) for form in tensors.forms] or [0])[tensors.form]
    equal = (counts[1:] == counts[:-1]) & (counts[1:] > 0) & (shape[1:] == shape[:-1]) & (first[1:] != first[:-1])
    found = np.flatnonzero(equal) + 1

    for column in columns:  # most differ in their first box
        found = found[column[first[found]] == column[first[found - 1]]]
    alike = np.zeros(len(tensors), bool)
    alike[found] = True
    found = found[counts[found] > 1]
    ends = np.cumsum(counts[found])
    at = 0
    while at < len(found):  # some tensors at a time
        stop = max(int(np.searchsorted(ends, ends[at] + BLOCK_ROWS)), at + 1)
        some = found[at:stop]
        row, before = ranges(first[some], counts[some]), ranges(first[some - 1], counts[some])
        differs = np.zeros(len(row), bool)
        for column in columns:
            differs |= column[row] != column[before]
        alike[some[np.logical_or.reduceat(differs, np.cumsum(counts[some]) - counts[some])]] = False
        at = stop
    return alike


def check_boxes(index: Index, where: str) -> None:
    """Check that boxes are not empty, lie in their tensors and are sorted.

    Args:
        index: index to check. Tensors that share boxes have the same shape and number of fragments.
        where: name of the file in messages.

    Raises:
        FormatError: a box violates this; the message names the first such box.
    """
    last = -1
    for place in _places(index, where):
        if int(place[0]) < last or np.any(place[1:] < place[:-1]):
            raise FormatError(f"{where}: fragments are not sorted by tensor and start")
        last = int(place[-1])


def box_places(index: Index, where: str) -> Ints:
    """Return int64 ``[m]``, the position of the first element of every box, after the checks of ``check_boxes`` but the last.

    Raises:
        FormatError: a box is empty or leaves its tensor.
    """
    return np.concatenate([np.zeros(0, np.int64), *_places(index, where)])


def _places(index: Index, where: str) -> Iterator[Ints]:
    ndim, linear, tensor = index.ndim, index.order, index.box_tensor
    wide = index.tensors.where(len(form.shape) > ndim for form in index.tensors.forms)
    for at in wide[index.fragments[wide] > 0].tolist():
        info = index.tensors[at]
        raise FormatError(f"{where}: fragments of {info.name!r} have {ndim} dimensions, expected {len(info.shape)}")
    for part in blocks(len(tensor)):
        ids = tensor[part]
        inside = np.ones(len(ids), bool)
        place = linear.first[ids]
        for dim in range(ndim):
            limit = linear.extents[ids, dim]
            begin, extent = (column[dim][part].astype(np.int64, copy=False) for column in (index.box_start, index.box_shape))
            inside &= (begin >= 0) & (extent > 0) & (begin <= limit) & (extent <= limit - begin)
            place += begin * linear.strides[ids, dim]
        if not inside.all():
            row = part.start + int(np.argmin(inside))
            info = index.tensors[int(tensor[row])]
            raise FormatError(f"{where}: fragment {row} of {info.name!r} is empty or leaves its tensor of shape {info.shape}")
        yield place


def check_complete(index: Index) -> None:
    """Check that the fragments of every stored tensor have as many elements as the tensor, and that derived ones have a source.

    Every load runs it: it takes one pass over the boxes and one over the tensors. It does not detect
    overlaps; ``check_coverage`` and the read plan do.

    Raises:
        CoverageError: a tensor is incomplete; the message names it.
    """
    tensors = index.tensors
    sums = np.append(0, np.cumsum(index.box_numel()))
    covered = sums[index.first_box + index.fragments] - sums[index.first_box]
    derived = np.zeros(len(tensors), bool)
    derived[tensors.where(form.derived_from is not None for form in tensors.forms)] = True
    for at in np.flatnonzero(derived | (covered != tensors.numel())).tolist():
        info = tensors[at]
        if info.derived_from is None:
            raise CoverageError(
                f"{info.name} ({info.state}) of shape {info.shape}: fragments cover {covered[at]} of {info.numel} elements"
            )
        found = tensors.ids.get((info.name, info.derived_from))
        source = None if found is None else tensors[found]
        if source is None or source.derived_from is not None:
            raise CoverageError(f"{info.name} ({info.state}) is derived from {info.derived_from}, which is not stored")
        if source.shape != info.shape:
            raise CoverageError(
                f"{info.name} ({info.state}) of shape {info.shape} is derived from {source.state} of shape {source.shape}"
            )


def check_coverage(index: Index) -> None:
    """Check that fragments cover every stored tensor exactly once and every derived one at most once.

    Raises:
        CoverageError: a tensor has a hole or two overlapping fragments; the message names the tensor and both boxes.
    """
    counts = index.box_counts
    several = np.flatnonzero(counts > 1)
    ends = np.cumsum(counts[several])
    at = 0
    while at < len(several):  # some tensors at a time: only boxes of one tensor can overlap
        stop = max(int(np.searchsorted(ends, ends[at] + _OVERLAP_ROWS)), at + 1)
        rows = ranges(index.first_box[several[at:stop]], counts[several[at:stop]])
        start, shape = (_matrix([column[rows] for column in part], len(rows)) for part in (index.box_start, index.box_shape))
        clash = find_overlap(start, shape, index.box_tensor[rows])
        if clash is not None:
            info = index.tensors[int(index.box_tensor[rows[clash[0]]])]
            ndim = len(info.shape)
            a, b = (Box(tuple(start[row, :ndim].tolist()), tuple(shape[row, :ndim].tolist())) for row in sorted(clash))
            raise CoverageError(f"{info.name} ({info.state}): fragments {a} and {b} overlap")
        at = stop
    check_complete(index)
