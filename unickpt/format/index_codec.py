"""Codec of the index file. It writes version 2 and reads versions 1 and 2.

``docs/reference/format.md`` is the normative description. Version 2 is smaller in three ways. A column has the
narrowest type that holds its largest value. Rows are counted per tensor instead of numbered. Consecutive
tensors with the same boxes in the same files, such as the states of a parameter, share their boxes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.errors import FormatError, NewerFormatError
from unickpt.format import tensor_table
from unickpt.format.boxes import Ints
from unickpt.format.index import MAX_NDIM, Index, LinearOrder, TensorInfo, check_boxes
from unickpt.format.safetensors_header import Header, TensorSlot, build_header, parse_header

FORMAT_VERSION = 2
MAX_UNPACKED_BYTES = 1 << 32  # memory limit of a reader
_UNSIGNED: dict[str, type[np.unsignedinteger[Any]]] = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
Column = npt.NDArray[Any]


def to_bytes(index: Index) -> bytes:
    """Serialise an index to a safetensors file."""
    ndim = index.start.shape[1]
    shared, own = index.same_boxes, index.own_boxes()
    columns: dict[str, npt.NDArray[Any]] = {"fragments": index.counts(), "same_boxes": shared, "file": index.file[own]}
    for dim in range(ndim):
        columns[f"start.{dim}"] = index.start[:, dim][own]
        columns[f"shape.{dim}"] = index.shape[:, dim][own]
    columns["offset_bytes"] = index.offset_bytes
    arrays = {name: _narrow(column) for name, column in columns.items()} | {"checksum": index.checksum}
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # keeps every column aligned to its item size
    metadata = {
        "format": "unickpt-index",
        "version": str(FORMAT_VERSION),
        "files": json.dumps(index.files),
        "tensors": tensor_table.to_text(index.tensors),
    }
    head, _ = build_header([(name, f"U{8 * arrays[name].itemsize}", arrays[name].shape) for name in names], metadata)
    return b"".join((head, *(arrays[name].tobytes() for name in names)))


def _narrow(column: npt.NDArray[Any]) -> Column:
    """Return a column in the narrowest unsigned dtype that holds its values."""
    largest = int(column.max(initial=0))
    return column.astype(next(kind for kind in _UNSIGNED.values() if largest <= np.iinfo(kind).max))


def from_bytes(data: bytes, *, where: str) -> Index:
    """Parse and validate an index.

    Args:
        data: the whole file.
        where: name of the file in messages.

    Raises:
        NewerFormatError: the version is newer than this release.
        FormatError: the index is inconsistent: a column is missing or has a wrong length, an id is out of
            range, a box is outside its tensor, or a dtype or kind is unknown.
    """
    header = parse_header(data, file_bytes=len(data), where=where)
    if header.metadata.get("format") != "unickpt-index":
        raise FormatError(f"{where}: not a unickpt index")
    with tensor_table.collector_paused():
        tensors = tensor_table.from_text(header.metadata.get("tensors", ""), where=where)
    files = tensor_table.json_of(header.metadata.get("files", ""), where=where)
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise FormatError(f"{where}: the file list must be a list of strings")
    columns = {slot.name: _column(data, header, slot, where) for slot in header.slots}
    match header.metadata.get("version"):
        case "2":
            return _version_2(columns, tensors, tuple(files), where)
        case "1" | None:  # early files of version 1 have no version
            return _version_1(columns, tensors, tuple(files), where)
        case version:
            raise NewerFormatError(
                f"{where}: index version {version!r}, this release reads up to {FORMAT_VERSION}; upgrade unickpt to load it"
            )


_DTYPES: dict[str, type[np.integer[Any]]] = {"I32": np.int32, "I64": np.int64, **_UNSIGNED}


def _column(data: bytes, header: Header, slot: TensorSlot, where: str) -> Column:
    if slot.dtype not in _DTYPES:
        raise FormatError(f"{where}: column {slot.name!r} is {slot.dtype}, expected one of {', '.join(_DTYPES)}")
    flat = np.frombuffer(data, _DTYPES[slot.dtype], math.prod(slot.shape), header.header_bytes + slot.begin_byte)
    return flat.reshape(slot.shape)


def _check_names(columns: Mapping[str, Column], expected: Iterable[str], where: str) -> None:
    if set(columns) != set(expected):
        raise FormatError(f"{where}: index columns are {sorted(columns)}, expected {sorted(expected)}")


# ---------------------------------------------------------------- version 2


def _version_2(columns: dict[str, Column], tensors: tuple[TensorInfo, ...], files: tuple[str, ...], where: str) -> Index:
    ndim = sum(name.startswith("start.") for name in columns)
    boxes = [f"{part}.{dim}" for part in ("start", "shape") for dim in range(ndim)]
    _check_names(columns, ["fragments", "same_boxes", "file", "offset_bytes", "checksum", *boxes], where)
    if ndim > MAX_NDIM:
        raise FormatError(f"{where}: boxes of {ndim} dimensions, more than {MAX_NDIM}")
    counts = _unsigned(columns, "fragments", len(tensors), 2**31, where).astype(np.int64)
    same = _unsigned(columns, "same_boxes", len(tensors), 2, where).astype(bool)
    total = int(counts.sum())
    if total * (24 + 16 * ndim) > MAX_UNPACKED_BYTES:
        raise FormatError(f"{where}: {total:,} fragments of {ndim} dimensions are too many for an index")
    _check_same(tensors, counts, same, where)
    box_counts = np.where(same, 0, counts)
    stored = int(box_counts.sum())
    file = _unsigned(columns, "file", stored, max(len(files), 1), where).astype(np.int32)
    start, shape = np.empty((ndim, stored), np.int64), np.empty((ndim, stored), np.int64)
    for dim in range(ndim):
        start[dim] = _unsigned(columns, f"start.{dim}", stored, 2**62, where)
        shape[dim] = _unsigned(columns, f"shape.{dim}", stored, 2**62, where)
    offset = _unsigned(columns, "offset_bytes", total, 2**62, where).astype(np.int64)
    checksum = columns["checksum"]
    if checksum.dtype != np.uint64 or checksum.shape != (total,):
        raise FormatError(f"{where}: column 'checksum' is {checksum.dtype} {checksum.shape}, expected uint64 of {total} rows")
    numbers = np.arange(len(tensors), dtype=np.int32)
    linear = LinearOrder.of(tensors, ndim)
    check_boxes(tensors, linear, np.repeat(numbers, box_counts), start.T, shape.T, where)
    if same.any():
        first = (np.cumsum(box_counts) - box_counts)[np.maximum.accumulate(np.where(same, 0, numbers))]
        box = np.arange(total, dtype=np.int64) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        file, start, shape = file[box], _take_rows(start, box), _take_rows(shape, box)
    return Index(tensors, files, np.repeat(numbers, counts), file, offset, checksum, start.T, shape.T)


def _unsigned(columns: Mapping[str, Column], name: str, count: int, limit: int, where: str) -> Column:
    """Return a column after checking that it has ``count`` unsigned numbers below ``limit``."""
    column = columns[name]
    if column.dtype.kind != "u" or column.shape != (count,):
        raise FormatError(f"{where}: column {name!r} is {column.dtype} {column.shape}, expected {count} unsigned integers")
    largest = int(column.max(initial=0))
    if largest >= limit:
        raise FormatError(f"{where}: column {name!r} has the value {largest}, expected less than {limit}")
    return column


def _check_same(tensors: Sequence[TensorInfo], counts: Ints, same: npt.NDArray[np.bool_], where: str) -> None:
    """Check that a tensor that shares the boxes of the previous tensor has the same shape and number of fragments."""
    for at in np.flatnonzero(same).tolist():
        if at == 0 or counts[at] != counts[at - 1] or tensors[at].shape != tensors[at - 1].shape:
            raise FormatError(
                f"{where}: {tensors[at].name!r} ({tensors[at].state}) cannot share the boxes of the previous tensor: "
                "there is none, or it has another shape or another number of fragments"
            )


def _take_rows(columns: Ints, rows: Ints) -> Ints:
    out = np.empty((len(columns), len(rows)), np.int64)
    for column, target in zip(columns, out, strict=True):
        np.take(column, rows, out=target)
    return out


# ---------------------------------------------------------------- version 1

_COLUMNS_1 = {
    "tensor": "int32", "file": "int32", "offset_bytes": "int64", "checksum": "uint64", "start": "int64", "shape": "int64",
}  # fmt: skip


def _version_1(columns: dict[str, Column], tensors: tuple[TensorInfo, ...], files: tuple[str, ...], where: str) -> Index:
    _check_names(columns, _COLUMNS_1, where)
    count = len(columns["tensor"]) if columns["tensor"].ndim == 1 else -1
    for name, dtype in _COLUMNS_1.items():
        column = columns[name]
        if column.dtype != dtype or column.ndim != (2 if name in ("start", "shape") else 1) or len(column) != count:
            raise FormatError(f"{where}: column {name!r} is {column.dtype} {column.shape}, expected {dtype} of {count} rows")
    start, shape = columns["start"], columns["shape"]
    if start.shape != shape.shape or start.shape[1] > MAX_NDIM:
        raise FormatError(f"{where}: columns 'start' {start.shape} and 'shape' {shape.shape} do not match")
    start, shape = (np.asfortranarray(column) for column in (start, shape))
    tensor, file, offset, checksum = (columns[name] for name in ("tensor", "file", "offset_bytes", "checksum"))
    index = Index(tensors, files, tensor, file, offset, checksum, start, shape)
    if count:
        if index.tensor.min() < 0 or index.tensor.max() >= len(tensors):
            raise FormatError(f"{where}: a fragment refers to tensor {index.tensor.max()}, the index has {len(tensors)}")
        if index.file.min() < 0 or index.file.max() >= len(files):
            raise FormatError(f"{where}: a fragment refers to file {index.file.max()}, the index has {len(files)}")
        if np.any(np.diff(index.tensor) < 0):
            raise FormatError(f"{where}: fragments are not sorted by tensor")
        if index.offset_bytes.min() < 0:
            raise FormatError(f"{where}: negative byte offset")
    check_boxes(tensors, index.order, index.tensor, start, shape, where)
    return index
