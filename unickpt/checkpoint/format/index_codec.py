"""Codec of the index file.

``docs/reference/format.md`` is the normative description. Three things keep the file small. A column has the narrowest type
that holds its largest value. Rows are counted per tensor, not numbered. Consecutive tensors with the same boxes in the same
files, such as the states of a parameter, share their boxes.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.errors import FormatError, NewerFormatError
from unickpt.checkpoint.format import tensor_table
from unickpt.checkpoint.format.index import MAX_NDIM, Index, check_boxes
from unickpt.checkpoint.format.safetensors_header import (
    MAX_HEADER_BYTES,
    Header,
    TensorSlot,
    build_header,
    header_bytes_of,
    parse_header,
)
from unickpt.checkpoint.format.tensor_table import TensorTable

_FORMAT, FORMAT_VERSION = "unickpt-index", 3
_WHOLE_VERSION = "2"  # fragments are not divided into blocks
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 4 << 10, 1 << 30
MAX_UNPACKED_BYTES = 1 << 32  # memory limit of a reader
_TABLE_KEY = b'"tensors":"'
_TABLE_MARK = "the table of tensors"
_SMALL_BYTES = 1 << 12
_UNSIGNED: dict[str, type[np.unsignedinteger[Any]]] = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
Column = npt.NDArray[Any]


def to_bytes(index: Index) -> bytes:
    """Serialise an index to a safetensors file."""
    index = index.shared()
    columns: dict[str, Column] = {"fragments": index.fragments, "same_boxes": index.same_boxes, "file": index.box_file}
    for dim in range(index.ndim):
        columns[f"start.{dim}"] = index.box_start[dim]
        columns[f"shape.{dim}"] = index.box_shape[dim]
    columns["offset_bytes"] = index.offset
    arrays = {name: narrow(column) for name, column in columns.items()} | {"checksum": index.checksum}
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # keeps every column aligned to its item size
    metadata = {
        "format": _FORMAT,
        "version": str(FORMAT_VERSION),
        "block_bytes": str(index.block_bytes),
        "files": json.dumps(index.files),
        "tensors": _TABLE_MARK,
    }
    slots = [(name, f"U{8 * arrays[name].itemsize}", arrays[name].shape) for name in names]
    head, _ = build_header(slots, metadata, alignment=1)
    before, _, after = head[8:].partition(f'"{_TABLE_MARK}"'.encode())
    parts = [before, *index.tensors.json_string(), after]
    length = sum(map(len, parts))
    padding = b" " * (-length % 8)
    if length + len(padding) > MAX_HEADER_BYTES:
        raise FormatError(f"the header of the index has {length} bytes, the limit of the format is {MAX_HEADER_BYTES}")
    prefix = (length + len(padding)).to_bytes(8, "little")
    return b"".join((prefix, *parts, padding, *(np.ascontiguousarray(arrays[name]).data for name in names)))


def narrow(column: Column) -> Column:
    """Return a column of numbers >= 0 in the narrowest unsigned dtype that holds its values."""
    if column.dtype == bool:
        return column.astype(np.uint8)
    largest = int(column.max(initial=0))
    kind = next(kind for kind in _UNSIGNED.values() if largest <= np.iinfo(kind).max)
    return column.astype(kind, copy=False)


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
    header, table = _header_and_table(data, where)
    if header.metadata.get("format") != _FORMAT:
        raise FormatError(f"{where}: not a unickpt index")
    version = header.metadata.get("version")
    if version in (None, "0", "1"):
        raise FormatError(f"{where}: index version {version!r}, expected {_WHOLE_VERSION} or {FORMAT_VERSION}")
    if version not in (_WHOLE_VERSION, str(FORMAT_VERSION)):
        raise NewerFormatError(
            f"{where}: index version {version!r}, this release reads up to {FORMAT_VERSION}; upgrade unickpt to load it"
        )
    with tensor_table.collector_paused():
        tensors = tensor_table.from_text(table, where=where)
    del table
    files = tensor_table.json_of(header.metadata.get("files", ""), where=where)
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise FormatError(f"{where}: the file list must be a list of strings")
    columns = {slot.name: _column(data, header, slot, where) for slot in header.slots}
    block_bytes = 0 if version == _WHOLE_VERSION else _block_bytes(header.metadata.get("block_bytes"), where)
    return _index(columns, tensors, tuple(files), block_bytes, where)


def _block_bytes(text: str | None, where: str) -> int:
    size = int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) <= 10 else -1
    if size and (not _LEAST_BLOCK_BYTES <= size <= _MOST_BLOCK_BYTES or size & (size - 1)):
        raise FormatError(
            f"{where}: block_bytes is {text!r}, expected 0 or a power of two from {_LEAST_BLOCK_BYTES} to {_MOST_BLOCK_BYTES}"
        )
    return size


def _header_and_table(data: bytes, where: str) -> tuple[Header, str | bytes]:
    """Return the header and the text of the table of tensors. Raises FormatError.

    The table is most of the header. If it needs no other escapes than those of quotes, it is taken out before the rest is
    parsed as JSON.
    """
    end = header_bytes_of(data[:8], file_bytes=len(data), where=where)
    begin = data.find(_TABLE_KEY, 8, end) + len(_TABLE_KEY)
    close = data.find(b']]"', begin, end) + 2
    if begin >= len(_TABLE_KEY) and close > begin and end - 8 > _SMALL_BYTES:
        raw = data[begin:close]
        table = raw.replace(b'\\"', b'"')
        if raw.count(b'"') == len(raw) - len(table) and b"\\" not in table:
            mark = secrets.token_hex(16)  # the author of a file cannot know it
            rest = b"".join((data[8:begin], mark.encode(), data[close:end]))
            small = len(rest).to_bytes(8, "little") + rest
            missing = end - len(small)
            with contextlib.suppress(FormatError):  # the whole header is parsed for the right message
                header = parse_header(small, file_bytes=len(data) - missing, where=where)
                if header.metadata.get("tensors") == mark:
                    return replace(header, header_bytes=header.header_bytes + missing), table
    header = parse_header(data, file_bytes=len(data), where=where)
    return header, header.metadata.get("tensors", "")


def _column(data: bytes, header: Header, slot: TensorSlot, where: str) -> Column:
    if slot.dtype not in _UNSIGNED:
        raise FormatError(f"{where}: column {slot.name!r} is {slot.dtype}, expected one of {', '.join(_UNSIGNED)}")
    flat = np.frombuffer(data, _UNSIGNED[slot.dtype], math.prod(slot.shape), header.header_bytes + slot.begin_byte)
    return flat.reshape(slot.shape)


def _index(columns: dict[str, Column], tensors: TensorTable, files: tuple[str, ...], block_bytes: int, where: str) -> Index:
    ndim = sum(name.startswith("start.") for name in columns)
    boxes = [f"{part}.{dim}" for part in ("start", "shape") for dim in range(ndim)]
    expected = {"fragments", "same_boxes", "file", "offset_bytes", "checksum", *boxes}
    if set(columns) != expected:
        raise FormatError(f"{where}: index columns are {sorted(columns)}, expected {sorted(expected)}")
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
    file = _unsigned(columns, "file", stored, max(len(files), 1), where)
    start, shape = (
        tuple(_unsigned(columns, f"{part}.{dim}", stored, 2**62, where) for dim in range(ndim)) for part in ("start", "shape")
    )
    offset = _unsigned(columns, "offset_bytes", total, 2**62, where)
    checksum = columns["checksum"]
    if checksum.dtype != np.uint64 or checksum.shape != (total,):
        raise FormatError(f"{where}: column 'checksum' is {checksum.dtype} {checksum.shape}, expected uint64 of {total} rows")
    index = Index(tensors, files, counts, same, file, start, shape, offset, checksum, block_bytes)
    check_boxes(index, where)
    return index


def _unsigned(columns: Mapping[str, Column], name: str, count: int, limit: int, where: str) -> Column:
    """Return a column after checking that it has ``count`` numbers below ``limit``."""
    column = columns[name]
    if column.shape != (count,):
        raise FormatError(f"{where}: column {name!r} is {column.dtype} {column.shape}, expected {count} unsigned integers")
    largest = int(column.max(initial=0))
    if largest >= limit:
        raise FormatError(f"{where}: column {name!r} has the value {largest}, expected less than {limit}")
    return column


def _check_same(tensors: TensorTable, counts: Ints, same: npt.NDArray[np.bool_], where: str) -> None:
    """Check that a tensor that shares the boxes of the previous tensor has the same shape and number of fragments."""
    for at in np.flatnonzero(same).tolist():
        if at == 0 or counts[at] != counts[at - 1] or _shape(tensors, at) != _shape(tensors, at - 1):
            raise FormatError(
                f"{where}: {tensors[at].name!r} ({tensors[at].state}) cannot share the boxes of the previous tensor: "
                "there is none, or it has another shape or another number of fragments"
            )


def _shape(tensors: TensorTable, at: int) -> tuple[int, ...]:
    return tensors.forms[int(tensors.form[at])].shape
