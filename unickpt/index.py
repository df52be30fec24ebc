"""The index: the table of all fragments of a checkpoint.

Columns, not objects: one numpy array per field, so that a query over a million fragments is a
handful of vectorised operations. ``rows.py`` makes it from what the ranks bring, ``index_file.py``
writes and reads it.

All elements of all tensors lie on one line: tensor after tensor in the order of the table, each in
row-major order. The first element of a box has a place on that line; sorted by it, an index is in
the order of the format, and what a box can have in common with others lies close together.
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

from unickpt.dtypes import itemsize_bytes
from unickpt.errors import CoverageError, FormatError
from unickpt.fragments import Box, Ints, find_overlap

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
        derived_from: None for a stored tensor; otherwise the state of the same name that this one is
            the cast of. A derived tensor may still have fragments: they override the cast where
            the running job held something else.
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
    """One fragment on its way into an index: which tensor, which box, where its bytes are."""

    tensor: TensorInfo
    box: Box
    offset_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Line:
    """Where the tensors of a table lie on the line of all elements.

    Attributes:
        first: int64 ``[t + 1]``, place of every tensor's first element, and the end.
        strides, extents: int64 ``[t, ndim]``, in elements, row-major; padded dimensions have extent 1.
    """

    first: Ints
    strides: Ints
    extents: Ints

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo], ndim: int) -> Line:
        """Of a table; dimensions beyond ``ndim`` are left out of ``strides`` and ``extents``.

        Raises:
            FormatError: there are more elements than any storage can hold.
        """
        if sum(info.numel for info in tensors) >= 2**62:
            raise FormatError(f"{len(tensors)} tensors have more elements together than any storage can hold")
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

    def places(self, tensor: npt.NDArray[np.integer[Any]], at: Ints) -> Ints:
        """int64 ``[n]``: place of one element each, by its tensor and its position in it (``[n, ndim]``)."""
        out = np.empty(len(tensor), np.int64)
        for part in blocks(len(tensor)):
            ids = tensor[part]
            place = self.first[ids]
            for dim in range(at.shape[1]):
                place += at[part, dim] * self.strides[ids, dim]
            out[part] = place
        return out


def blocks(count: int) -> Iterator[slice]:
    """Rows in blocks that fit into the cache: what is computed on the way is not memory that has to be fetched first."""
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
        start, shape: int64 ``[n, ndim]``, the boxes; a tensor of lower rank is padded with trailing
            dimensions ``start 0, shape 1``. Rows are sorted by (tensor, start). Stored dimension by
            dimension (Fortran order), as they are worked on.
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
    def line(self) -> Line:
        """The line that this index is sorted by."""
        return Line.of(self.tensors, self.start.shape[1])

    def ids(self) -> dict[tuple[str, str], int]:
        """Position of every (name, state)."""
        return {info.key: position for position, info in enumerate(self.tensors)}

    def rows_of(self, tensor_id: int) -> range:
        """Rows of the fragments of one tensor; they are consecutive."""
        lo, hi = np.searchsorted(self.tensor, [tensor_id, tensor_id + 1])
        return range(int(lo), int(hi))

    def counts(self) -> Ints:
        """int64 ``[t]``: fragments of every tensor."""
        return np.bincount(self.tensor, minlength=len(self.tensors))

    @cached_property
    def same_boxes(self) -> npt.NDArray[np.bool_]:
        """``[t]``: whether a tensor has the boxes of the one before it, on the same files, row by row."""
        counts, extents = self.counts(), self.line.extents
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
        """``[n]``: the rows of the tensors that do not have the boxes of the one before them."""
        return np.repeat(~self.same_boxes, self.counts())

    def box(self, row: int) -> Box:
        """The box of one row, without padding dimensions."""
        ndim = len(self.tensors[int(self.tensor[row])].shape)
        return Box(tuple(self.start[row, :ndim].tolist()), tuple(self.shape[row, :ndim].tolist()))

    def numel(self) -> Ints:
        """int64 ``[n]``: elements of every fragment."""
        return volumes(self.shape)

    def size_bytes(self) -> Ints:
        """int64 ``[n]``: bytes of every fragment."""
        sizes = np.array([itemsize_bytes(t.dtype) for t in self.tensors] or [0], np.int64)
        found = self.numel()
        for part in blocks(len(found)):
            found[part] *= sizes[self.tensor[part]]
        return found


def volumes(shape: Ints) -> Ints:
    """int64 ``[n]``: elements of boxes by their extents ``[n, ndim]``."""
    count = np.ones(len(shape), np.int64)
    for dim in range(shape.shape[1]):
        count *= shape[:, dim]
    return count


def check_boxes(
    tensors: Sequence[TensorInfo], line: Line, tensor: npt.NDArray[np.integer[Any]], start: Ints, shape: Ints, where: str
) -> None:
    """Boxes lie in their tensors, none is empty, and they are sorted.

    Args:
        tensors, line: the table; every value of ``tensor`` is a position in it.
        tensor: int ``[n]``, ascending.
        start, shape: int64 ``[n, ndim]``.
        where: names the file in messages.

    Raises:
        FormatError: names the first fragment that is wrong.
    """
    ndim = start.shape[1]
    wide = np.array([at for at, info in enumerate(tensors) if len(info.shape) > ndim], tensor.dtype)
    for at in wide[np.searchsorted(tensor, wide) < np.searchsorted(tensor, wide, side="right")].tolist():
        info = tensors[at]
        raise FormatError(f"{where}: fragments of {info.name!r} have {ndim} dimensions, it has {len(info.shape)}")
    for part in blocks(len(tensor)):
        ids = tensor[part]
        inside = np.ones(len(ids), bool)
        for dim in range(ndim):
            limit, begin, extent = line.extents[ids, dim], start[part, dim], shape[part, dim]
            inside &= (begin >= 0) & (extent > 0) & (begin <= limit) & (extent <= limit - begin)
        if not inside.all():
            row = part.start + int(np.argmin(inside))
            info = tensors[int(tensor[row])]
            raise FormatError(f"{where}: fragment {row} of {info.name!r} leaves its tensor of shape {info.shape}")
    place = line.places(tensor, start)
    if np.any(place[1:] < place[:-1]):
        raise FormatError(f"{where}: fragments are not sorted by tensor and start")


def check_complete(index: Index) -> None:
    """Every stored tensor has fragments of as many elements as it has; every derived one a stored source.

    Cheap enough for every load: one pass over the columns and one over the tensors. That fragments
    of one tensor are disjoint as well is for ``check_coverage``, and for the plan of those that are read.

    Raises:
        CoverageError: names the tensor.
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
                raise CoverageError(f"{info.name} ({info.state}) of shape {info.shape} is derived from one of {source.shape}")
        elif count != info.numel:
            raise CoverageError(
                f"{info.name} ({info.state}) of shape {info.shape}: fragments cover {count} of {info.numel} elements"
            )


def _rows(boxes: Ints, rows: Ints) -> Ints:
    """Some rows of ``[n, ndim]``, dimension by dimension in memory."""
    return np.stack([column[rows] for column in boxes.T], axis=1) if boxes.shape[1] else boxes[rows]


def check_coverage(index: Index) -> None:
    """Every stored tensor is covered exactly once, every derived one at most once.

    Raises:
        CoverageError: names the tensor and the hole's size or the two overlapping boxes.
    """
    rows = np.flatnonzero(index.own_boxes())
    clash = find_overlap(_rows(index.start, rows), _rows(index.shape, rows), index.tensor[rows])
    if clash is not None:
        a, b = (index.box(int(rows[at])) for at in sorted(clash))
        info = index.tensors[int(index.tensor[rows[clash[0]]])]
        raise CoverageError(f"{info.name} ({info.state}): fragments {a} and {b} overlap")
    check_complete(index)
