"""The index: the table of all fragments of a checkpoint.

Columns, not objects: one numpy array per field, so that a query over a million fragments is a
handful of vectorised operations. On disk it is one safetensors file; the tensors' names and
shapes are JSON in its header (``docs/format.md`` is the normative description).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.dtypes import itemsize_bytes
from unickpt.errors import CoverageError, FormatError
from unickpt.fragments import Box, Ints, find_overlap
from unickpt.safetensors_io import Header, build_header, parse_header

FORMAT_VERSION = 1
MAX_NDIM = 32
KINDS = ("parameter", "buffer", "optimizer", "object")
_COLUMNS = (
    ("tensor", np.int32, "I32"),
    ("file", np.int32, "I32"),
    ("offset_bytes", np.int64, "I64"),
    ("checksum", np.uint64, "U64"),
)


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
            dimensions ``start 0, shape 1``. Rows are sorted by (tensor, start).
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

    def ids(self) -> dict[tuple[str, str], int]:
        """Position of every (name, state)."""
        return {info.key: position for position, info in enumerate(self.tensors)}

    def rows_of(self, tensor_id: int) -> range:
        """Rows of the fragments of one tensor; they are consecutive."""
        lo, hi = np.searchsorted(self.tensor, [tensor_id, tensor_id + 1])
        return range(int(lo), int(hi))

    def box(self, row: int) -> Box:
        """The box of one row, without padding dimensions."""
        ndim = len(self.tensors[int(self.tensor[row])].shape)
        return Box(tuple(self.start[row, :ndim].tolist()), tuple(self.shape[row, :ndim].tolist()))

    def numel(self) -> Ints:
        """int64 ``[n]``: elements of every fragment."""
        count: Ints = self.shape.prod(axis=1, dtype=np.int64)
        return count

    def size_bytes(self) -> Ints:
        """int64 ``[n]``: bytes of every fragment."""
        sizes = np.array([itemsize_bytes(t.dtype) for t in self.tensors] or [0], np.int64)
        found: Ints = self.numel() * sizes[self.tensor]
        return found


def build(rows: Sequence[FragmentRow], *, file: str, tensors: Sequence[TensorInfo] = ()) -> Index:
    """The index of one data file.

    Args:
        rows: its fragments.
        file: its path relative to the checkpoint directory.
        tensors: further tensors to list, such as derived or empty ones, that have no fragment.
    """
    table = _merge_tensors([[row.tensor for row in rows], tensors])
    ids = {info.key: position for position, info in enumerate(table)}
    ndim = max((len(row.tensor.shape) for row in rows), default=0)
    start = np.zeros((len(rows), ndim), np.int64)
    shape = np.ones((len(rows), ndim), np.int64)
    for at, row in enumerate(rows):
        start[at, : row.box.ndim] = row.box.start
        shape[at, : row.box.ndim] = row.box.shape
    return _sorted(
        Index(
            tensors=table,
            files=(file,),
            tensor=np.array([ids[row.tensor.key] for row in rows], np.int32),
            file=np.zeros(len(rows), np.int32),
            offset_bytes=np.array([row.offset_bytes for row in rows], np.int64),
            checksum=np.array([row.checksum for row in rows], np.uint64),
            start=start,
            shape=shape,
        )
    )


def merge(parts: Sequence[Index]) -> Index:
    """One index of several ranks' indexes; the file lists must be disjoint."""
    table = _merge_tensors([part.tensors for part in parts])
    ids = {info.key: position for position, info in enumerate(table)}
    files = tuple(name for part in parts for name in part.files)
    if len(set(files)) != len(files):
        raise FormatError(f"ranks wrote to the same file: {sorted(f for f in files if files.count(f) > 1)}")
    ndim = max((part.start.shape[1] for part in parts), default=0)
    tensor, file = [], []
    first_file = 0
    for part in parts:
        new_ids = np.array([ids[info.key] for info in part.tensors] or [0], np.int32)
        tensor.append(new_ids[part.tensor])
        file.append(part.file + np.int32(first_file))
        first_file += len(part.files)
    return _sorted(
        Index(
            tensors=table,
            files=files,
            tensor=np.concatenate(tensor).astype(np.int32),
            file=np.concatenate(file).astype(np.int32),
            offset_bytes=np.concatenate([part.offset_bytes for part in parts]),
            checksum=np.concatenate([part.checksum for part in parts]),
            start=np.concatenate([_padded(part.start, ndim, 0) for part in parts]),
            shape=np.concatenate([_padded(part.shape, ndim, 1) for part in parts]),
        )
    )


def _padded(column: Ints, ndim: int, fill: int) -> Ints:
    return np.pad(column, ((0, 0), (0, ndim - column.shape[1])), constant_values=fill)


def _merge_tensors(lists: Sequence[Sequence[TensorInfo]]) -> tuple[TensorInfo, ...]:
    known: dict[tuple[str, str], TensorInfo] = {}
    for tensors in lists:
        for info in tensors:
            other = known.setdefault(info.key, info)
            if other != info:
                raise CoverageError(f"ranks disagree on tensor {info.name} ({info.state}): {other} and {info}")
    return tuple(sorted(known.values(), key=lambda info: info.key))


def _sorted(index: Index) -> Index:
    keys: list[npt.NDArray[Any]] = [index.start[:, dim] for dim in range(index.start.shape[1] - 1, -1, -1)]
    order = np.lexsort((*keys, index.tensor))
    return Index(
        tensors=index.tensors,
        files=index.files,
        tensor=index.tensor[order],
        file=index.file[order],
        offset_bytes=index.offset_bytes[order],
        checksum=index.checksum[order],
        start=index.start[order],
        shape=index.shape[order],
    )


def check_complete(index: Index) -> None:
    """Every stored tensor has fragments of as many elements as it has; every derived one a stored source.

    Cheap enough for every load: one pass over the columns and one over the tensors. That fragments
    of one tensor are disjoint as well is for ``check_coverage``, and for the plan of those that are read.

    Raises:
        CoverageError: names the tensor.
    """
    covered = np.zeros(len(index.tensors), np.int64)
    np.add.at(covered, index.tensor, index.numel())
    ids = index.ids()
    for info, count in zip(index.tensors, covered.tolist(), strict=True):
        if info.derived_from is not None:
            at = ids.get((info.name, info.derived_from))
            source = None if at is None else index.tensors[at]
            if source is None or source.derived_from is not None:
                raise CoverageError(f"{info.name} ({info.state}) is derived from {info.derived_from}, which is not stored")
            if source.shape != info.shape:
                raise CoverageError(f"{info.name} ({info.state}) of shape {info.shape} is derived from one of {source.shape}")
        elif count != info.numel:
            raise CoverageError(
                f"{info.name} ({info.state}) of shape {info.shape}: fragments cover {count} of {info.numel} elements"
            )


def check_coverage(index: Index) -> None:
    """Every stored tensor is covered exactly once, every derived one at most once.

    Raises:
        CoverageError: names the tensor and the hole's size or the two overlapping boxes.
    """
    _check_disjoint(index)
    check_complete(index)


def _check_disjoint(index: Index) -> None:
    for position, info in enumerate(index.tensors):
        rows = index.rows_of(position)
        ndim = len(info.shape)
        clash = find_overlap(index.start[rows.start : rows.stop, :ndim], index.shape[rows.start : rows.stop, :ndim])
        if clash is not None:
            a, b = (index.box(rows.start + at) for at in clash)
            raise CoverageError(f"{info.name} ({info.state}): fragments {a} and {b} overlap")


def to_bytes(index: Index) -> bytes:
    """Serialise to one safetensors file."""
    arrays: list[tuple[str, str, npt.NDArray[Any]]] = [
        (name, code, np.ascontiguousarray(getattr(index, name), dtype)) for name, dtype, code in _COLUMNS
    ]
    arrays += [("start", "I64", np.ascontiguousarray(index.start)), ("shape", "I64", np.ascontiguousarray(index.shape))]
    arrays.sort(key=lambda a: -a[2].itemsize)  # keeps every column aligned to its item size
    tensors = [[t.name, t.state, t.dtype, list(t.shape), t.kind, t.derived_from] for t in index.tensors]
    metadata = {
        "format": "unickpt-index",
        "version": str(FORMAT_VERSION),
        "files": json.dumps(index.files),
        "tensors": json.dumps(tensors, separators=(",", ":"), ensure_ascii=False),
    }
    head, _ = build_header([(name, code, array.shape) for name, code, array in arrays], metadata)
    return head + b"".join(array.tobytes() for _, _, array in arrays)


def from_bytes(data: bytes, *, where: str) -> Index:
    """Parse and validate an index.

    Args:
        data: the whole file.
        where: names the file in messages.

    Raises:
        FormatError: anything that is not a consistent index: columns missing or of another length,
            ids out of range, boxes outside their tensors, unknown dtypes or kinds.
    """
    header = parse_header(data, file_bytes=len(data), where=where)
    if header.metadata.get("format") != "unickpt-index":
        raise FormatError(f"{where}: not a unickpt index")
    columns = _columns(data, header, where)
    tensors = _tensor_table(header.metadata.get("tensors", ""), where)
    files = _json(header.metadata.get("files", ""), where)
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise FormatError(f"{where}: the file list must be a list of strings")
    index = Index(tensors=tensors, files=tuple(files), **columns)
    _check_rows(index, where)
    return index


def _columns(data: bytes, header: Header, where: str) -> dict[str, Any]:
    expected = {name: (dtype, code) for name, dtype, code in _COLUMNS}
    expected |= {"start": (np.int64, "I64"), "shape": (np.int64, "I64")}
    slots = {slot.name: slot for slot in header.slots}
    if set(slots) != set(expected):
        raise FormatError(f"{where}: index columns are {sorted(slots)}, expected {sorted(expected)}")
    count = slots["tensor"].shape[0] if len(slots["tensor"].shape) == 1 else -1
    out: dict[str, Any] = {}
    for name, (dtype, code) in expected.items():
        slot = slots[name]
        ndim = 2 if name in ("start", "shape") else 1
        if slot.dtype != code or len(slot.shape) != ndim or slot.shape[0] != count:
            raise FormatError(f"{where}: column {name!r} is {slot.dtype} {slot.shape}, expected {code} of {count} rows")
        flat = np.frombuffer(data, dtype, count=math.prod(slot.shape), offset=header.header_bytes + slot.begin_byte)
        out[name] = flat.reshape(slot.shape)
    if out["start"].shape != out["shape"].shape or out["start"].shape[1] > MAX_NDIM:
        raise FormatError(f"{where}: start {out['start'].shape} and shape {out['shape'].shape} do not belong together")
    return out


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{where}: index metadata is not JSON ({err})") from None


def _tensor_table(text: str, where: str) -> tuple[TensorInfo, ...]:
    table = _json(text, where)
    if not isinstance(table, list):
        raise FormatError(f"{where}: the tensor table is not a list")
    tensors = []
    for entry in table:
        match entry:
            case [str(name), str(state), str(dtype), list(shape), str(kind), None | str() as derived]:
                pass
            case _:
                raise FormatError(f"{where}: malformed tensor entry {str(entry)[:200]}")
        if kind not in KINDS or len(shape) > MAX_NDIM or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
            raise FormatError(f"{where}: tensor {name!r} has kind {kind!r} and shape {shape}")
        if math.prod(shape) * itemsize_bytes(dtype) >= 2**62:
            raise FormatError(f"{where}: tensor {name!r} of shape {shape} is larger than any storage")
        tensors.append(TensorInfo(name, state, dtype, tuple(shape), kind, derived))
    keys = [info.key for info in tensors]
    if keys != sorted(set(keys)):
        raise FormatError(f"{where}: the tensor table is not sorted, or names a tensor twice")
    return tuple(tensors)


def _check_rows(index: Index, where: str) -> None:
    if not len(index):
        return
    if index.tensor.min() < 0 or index.tensor.max() >= len(index.tensors):
        raise FormatError(f"{where}: a fragment names tensor {index.tensor.max()} of {len(index.tensors)}")
    if index.file.min() < 0 or index.file.max() >= len(index.files):
        raise FormatError(f"{where}: a fragment names file {index.file.max()} of {len(index.files)}")
    if np.any(np.diff(index.tensor) < 0):
        raise FormatError(f"{where}: fragments are not sorted by tensor")
    limits = np.ones((len(index.tensors), index.start.shape[1]), np.int64)
    for position, info in enumerate(index.tensors):
        if len(info.shape) > limits.shape[1] and len(index.rows_of(position)):
            raise FormatError(
                f"{where}: fragments of {info.name!r} have {limits.shape[1]} dimensions, it has {len(info.shape)}"
            )
        limits[position, : len(info.shape)] = info.shape[: limits.shape[1]]
    limit = limits[index.tensor]
    inside = (index.start >= 0) & (index.shape > 0) & (index.start <= limit) & (index.shape <= limit - index.start)
    if not inside.all():
        row = int(np.flatnonzero(~inside.all(axis=1))[0])
        info = index.tensors[int(index.tensor[row])]
        raise FormatError(f"{where}: fragment {row} of {info.name!r} leaves its tensor of shape {info.shape}")
    if index.offset_bytes.min() < 0:
        raise FormatError(f"{where}: negative byte offset")
