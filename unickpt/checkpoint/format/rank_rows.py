"""Index rows of one rank as a file, and the merge of all of them into the index.

A job can have thousands of ranks, so the cost per rank is small. The rows of a rank are one array, which is only
concatenated. The table of tensors is the same text on all ranks that hold parts of the same tensors, and is parsed
once per text. One sort covers all rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.errors import CoverageError, FormatError
from unickpt.checkpoint.format import table_text, tensor_table
from unickpt.checkpoint.format.boxes import sort_order
from unickpt.checkpoint.format.index import FragmentRow, Index, box_places, like_previous
from unickpt.checkpoint.format.linear_order import Column, blocks
from unickpt.checkpoint.format.row_columns import FIELDS, RowColumns
from unickpt.checkpoint.format.safetensors_header import MAX_HEADER_BYTES, build_header, header_bytes_of, parse_header
from unickpt.checkpoint.format.table_text import Entries, Forms
from unickpt.checkpoint.format.tensor_info import MAX_NDIM, TensorInfo
from unickpt.checkpoint.format.tensor_table import TensorTable

_BATCH_BYTES = 1 << 22  # ranks are parsed together until their rows take this much memory
_SLOTS = [("rows", "I64", 2), ("tensors", "U8", 1), ("own", "U8", 1)]  # name, dtype, dimensions; in this order
_FORMAT = "unickpt-rows"


def to_bytes(rows: Sequence[FragmentRow], tensors: Sequence[TensorInfo] = ()) -> bytes:
    """Serialise the rows of one rank.

    Args:
        rows: the fragments in the data file of the rank.
        tensors: further tensors without a fragment, such as derived or empty ones.

    Raises:
        CoverageError: two different tensors have the same name and state.
    """
    known = _TensorNumbers()
    for info in (*(row.tensor for row in rows), *tensors):
        known.number(info)
    infos = sorted(known.infos, key=lambda info: info.key)
    shared, own = ([info for info in infos if (info.kind == "object") is kind] for kind in (False, True))
    ids = {info.key: position for position, info in enumerate((*shared, *own))}
    ndim = max((len(info.shape) for info in infos), default=0)
    table = np.zeros((len(rows), FIELDS + 2 * ndim), np.int64)
    table[:, FIELDS + ndim :] = 1
    table[:, 0] = [ids[row.tensor.key] for row in rows]
    table[:, 1] = [row.offset_bytes for row in rows]
    table[:, 2] = np.array([row.checksum for row in rows], np.uint64).view(np.int64)
    for at, row in enumerate(rows):
        table[at, FIELDS : FIELDS + row.box.ndim] = row.box.start
        table[at, FIELDS + ndim : FIELDS + ndim + row.box.ndim] = row.box.shape
    return pack(table, packed_table(shared), own)


def packed_table(tensors: Sequence[TensorInfo]) -> bytes:
    """Return the compressed text of a sorted table of tensors. Names repeat, so it compresses well."""
    return zlib.compress(tensor_table.to_text(tensors).encode(), 1)


def pack(rows: Ints, shared: bytes, own: Sequence[TensorInfo]) -> bytes:
    """Serialise rows to a safetensors file.

    Args:
        rows: int64 ``[n, 3 + 2 * ndim]``: tensor (position in ``shared`` followed by ``own``), offset in the
            data file, checksum (as 64 bits), start and shape of the box, padded as in the index.
        shared: packed table of all tensors except objects. Other ranks have the same table.
        own: sorted objects, which differ between ranks.
    """
    tables = (shared, tensor_table.to_text(own).encode())
    slots = [("rows", "I64", rows.shape), *((n, "U8", (len(t),)) for n, t in zip(("tensors", "own"), tables, strict=True))]
    head, _ = build_header(slots, {"format": _FORMAT})
    return b"".join((head, np.ascontiguousarray(rows).tobytes(), *tables))


def merge(parts: Iterable[tuple[str, bytes]]) -> Index:
    """Merge the rows of all ranks into an index.

    Args:
        parts: ``(path, rows)`` of every rank: the path of its data file, and its rows as returned by ``to_bytes``.

    Raises:
        FormatError: rows are malformed, a box leaves its tensor, or two ranks use the same file.
        CoverageError: ranks disagree on a tensor.
    """
    reader = _RankRowsReader()
    with tensor_table.collector_paused():
        for name, data in parts:
            reader.add(name, data)
        reader.flush()
    files = reader.files
    if len(set(files)) != len(files):
        raise FormatError(f"several ranks wrote to the same file: {sorted({f for f in files if files.count(f) > 1})}")
    tensors, position = reader.merged_table()
    return _sorted(tensors, tuple(files), reader.columns, position, np.array(reader.row_counts, np.int64))


def _sorted(
    tensors: TensorTable, files: tuple[str, ...], columns: RowColumns, position: npt.NDArray[np.int32], row_counts: Ints
) -> Index:
    """Sort and validate rows and return them as an index.

    Args:
        tensors, files: tables of the index.
        columns: rows of all ranks.
        position: position in ``tensors`` by the numbers of column ``tensor``.
        row_counts: number of rows of every rank.
    """
    where, ndim = "the ranks' rows", columns.ndim
    counts = columns.group(position, len(tensors))
    file = columns.grouped(np.repeat(np.arange(len(files), dtype=np.uint16 if len(files) < 1 << 16 else np.int32), row_counts))
    boxes = [columns.take(f"{part}.{dim}") for part in ("start", "shape") for dim in range(ndim)]
    same = like_previous(tensors, counts, np.cumsum(counts) - counts, (file, *boxes))
    if same.any():
        own = np.repeat(~same, counts)
        file, *boxes = (column[own] for column in (file, *boxes))
        del own

    def of(file: Column, boxes: Sequence[Column], offset: Column, checksum: npt.NDArray[Any]) -> Index:
        return Index(tensors, files, counts, same, file, tuple(boxes[:ndim]), tuple(boxes[ndim:]), offset, checksum)

    grouped = of(file, boxes, columns.take("offset"), columns.take("checksum"))
    places = box_places(grouped, where)
    if len(grouped) and int(grouped.offset.min()) < 0:
        raise FormatError(f"{where}: negative byte offset")
    if np.all(places[1:] >= places[:-1]):
        return grouped.shared()
    order = sort_order(places)
    del places
    file, *boxes = (column[order] for column in (file, *boxes))
    offset, checksum = np.empty_like(grouped.offset), np.empty_like(grouped.checksum)
    for part in blocks(len(grouped)):
        row = order[grouped.boxes_of(part)] - grouped.per_row(grouped.to_box, part)
        np.take(grouped.offset, row, out=offset[part], mode="clip")
        np.take(grouped.checksum, row, out=checksum[part], mode="clip")
    return of(file, boxes, offset, checksum).shared()


class _TensorNumbers:
    """Numbers of tensors in order of first appearance."""

    def __init__(self) -> None:
        self.infos: list[TensorInfo] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, info: TensorInfo) -> int:
        """Return the position of a tensor in ``infos``; a new tensor is appended. Raises CoverageError."""
        at = self._numbers.setdefault(info.key, len(self.infos))
        if at == len(self.infos):
            self.infos.append(info)
        elif self.infos[at] != info:
            raise _disagreement(self.infos[at], info)
        return at


def _disagreement(one: TensorInfo, other: TensorInfo) -> CoverageError:
    return CoverageError(f"ranks disagree on tensor {other.name} ({other.state}): {one} and {other}")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Header of a rank's rows: size of the header and of the whole, and positions of rows and tables."""

    size: int
    fields: int
    rows: tuple[int, int, int]  # number, begin, end
    tensors: tuple[int, int]
    own: int


class _RankRowsReader:
    """Parser of the rows of many ranks. Headers and tables that ranks have in common are parsed once.

    Tensors have numbers: those of shared tables and of unusual tables of objects from 0 up, those of other objects from -1
    down.

    Attributes:
        files, row_counts: data file and number of rows of every rank.
        columns: the rows. Column ``tensor`` has the numbers.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.row_counts: list[int] = []
        self.columns = RowColumns()
        self._table = _TensorNumbers()
        self._forms = Forms()
        self._objects: list[Entries] = []
        self._object_count = 0
        self._shapes: dict[bytes, _Shape] = {}
        self._shared: dict[bytes, Ints] = {}  # text of a shared table -> the numbers of its tensors
        self._text = b""  # of the last shared table
        self._waiting: list[tuple[bytes, bytes, memoryview]] = []  # of the last ranks: shared table, own table, rows
        self._fields = FIELDS
        self._bytes = 0

    def add(self, name: str, data: bytes) -> None:
        """Take the rows of the next rank. Raises FormatError, CoverageError."""
        where = f"rows of {name}"
        head = data[: header_bytes_of(data[:8], file_bytes=len(data), where=where)]
        shape = self._shapes.get(head)
        if shape is None:
            shape = self._shapes[head] = _shape(data, where)
        if shape.size != len(data):
            raise FormatError(f"{where}: {len(data)} bytes, expected {shape.size}")
        begin, end = shape.tensors
        text = self._text
        if len(text) != end - begin or not data.startswith(text, begin):
            text = data[begin:end]
            if text not in self._shared:
                infos = tensor_table.infos_of_text(_unpacked(text, where), where=where)
                self._shared[text] = np.array([self._table.number(info) for info in infos], np.int64)
            self._text = text
        count, begin, end = shape.rows
        if shape.fields != self._fields or self._bytes > _BATCH_BYTES:
            self.flush()
            self._fields = shape.fields
        self.files.append(name)
        self.row_counts.append(count)
        self._waiting.append((text, data[shape.own :], memoryview(data)[begin:end]))
        self._bytes += len(data) - shape.own + end - begin

    def flush(self) -> None:
        """Parse the ranks that wait. Raises FormatError, CoverageError."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        names = self.files[-len(waiting) :]
        counts = np.array(self.row_counts[-len(waiting) :], np.int64)
        rows = np.frombuffer(b"".join([each[2] for each in waiting]), np.int64).reshape(int(counts.sum()), self._fields)
        number, own_counts = self._own_numbers([each[1] for each in waiting], names)
        tables = dict.fromkeys(each[0] for each in waiting)
        lengths = np.array([len(self._shared[text]) for text in tables], np.int64)
        places = {text: at for at, text in enumerate(tables)}
        which = np.array([places[each[0]] for each in waiting], np.int64)
        numbers = np.concatenate([*(self._shared[text] for text in tables), number])
        common, begin = lengths[which], (np.cumsum(lengths) - lengths)[which]  # per rank
        shift = int(lengths.sum()) + np.cumsum(own_counts) - own_counts - common
        rank, at = np.repeat(np.arange(len(waiting)), counts), rows[:, 0]
        wrong = (at < 0) | (at >= (common + own_counts)[rank])
        if wrong.any():
            row = int(np.argmax(wrong))
            raise FormatError(f"rows of {names[rank[row]]}: a fragment refers to tensor {at[row]}, which is not in the table")
        self.columns.add(numbers[at + np.where(at < common[rank], begin[rank], shift[rank])], rows)

    def _own_numbers(self, texts: Sequence[bytes], names: Sequence[str]) -> tuple[Ints, Ints]:
        """Return the numbers of the tensors in the own tables of some ranks, and how many each rank has."""
        used = [text[1:-1] for text in texts if text != b"[]"]
        if all(text[:1] + text[-1:] == b"[]" for text in texts) and all(text[:2] + text[-1:] == b'["]' for text in used):
            entries = table_text.scan(b",".join(used), self._forms)
            if entries is not None:
                begin = np.cumsum([0, *(len(text) - 1 if text != b"[]" else 0 for text in texts)])
                first = np.searchsorted(entries.begin, begin)
                if np.isin(entries.falls, first).all():
                    self._objects.append(entries)
                    self._object_count += len(entries)
                    numbers = -1 - np.arange(self._object_count - len(entries), self._object_count, dtype=np.int64)
                    return numbers, np.diff(first)
        found = [tensor_table.infos_of_text(text, where=f"rows of {name}") for text, name in zip(texts, names, strict=True)]
        numbers = np.array([self._table.number(info) for infos in found for info in infos], np.int64)
        return numbers, np.array([len(infos) for infos in found], np.int64)

    def merged_table(self) -> tuple[TensorTable, npt.NDArray[np.int32]]:
        """Return the table of all tensors, and their positions in it by number. Raises CoverageError."""
        infos, forms = self._table.infos, self._forms
        order = sorted(range(len(infos)), key=lambda at: infos[at].key)
        text = table_text.entries_text([infos[at] for at in order])
        shared = table_text.scan(text.encode(), forms) if text.isascii() else None
        if shared is not None and not len(shared.falls):
            objects, self._objects = self._objects, []
            entries = table_text.joined([shared, *objects])
            del objects
            found = table_text.merged(entries, forms)
            if found is not None:
                done, place, differ = found
                if differ is not None:
                    one, other = (TensorTable.of_entries(entries, forms)[at] for at in differ)
                    raise _disagreement(one, other)
                position = np.empty(len(entries), np.int32)
                position[order] = place[: len(order)]
                position[len(order) :] = place[len(order) :][::-1]
                return TensorTable.of_entries(done, forms), position
            self._objects = [entries]
        numbers = [self._table.number(info) for each in self._objects for info in TensorTable.of_entries(each, forms)]
        order = sorted(range(len(infos)), key=lambda at: infos[at].key)
        position = np.empty(len(infos), np.int32)
        position[order] = np.arange(len(infos), dtype=np.int32)
        own = np.array(numbers[len(numbers) - self._object_count :], np.int64)
        return TensorTable([infos[at] for at in order]), np.concatenate([position, position[own][::-1]])


def _shape(data: bytes, where: str) -> _Shape:
    header = parse_header(data, file_bytes=len(data), where=where)
    slots = [(slot.name, slot.dtype, len(slot.shape)) for slot in header.slots]
    if header.metadata.get("format") != _FORMAT or slots != _SLOTS:
        raise FormatError(f"{where}: not an index-rows file of a rank")
    rows, tensors, own = header.slots
    fields = rows.shape[1]
    if fields < FIELDS or (fields - FIELDS) % 2 or fields > FIELDS + 2 * MAX_NDIM:
        raise FormatError(f"{where}: rows have {fields} columns")
    begin = header.header_bytes
    return _Shape(
        size=begin + own.end_byte,
        fields=fields,
        rows=(rows.shape[0], begin, begin + rows.end_byte),
        tensors=(begin + tensors.begin_byte, begin + tensors.end_byte),
        own=begin + own.begin_byte,
    )


def _unpacked(data: bytes, where: str) -> bytes:
    """Decompress a table, up to ``MAX_HEADER_BYTES``. Raises FormatError."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_HEADER_BYTES)
    except zlib.error as err:
        raise FormatError(f"{where}: the tensor table cannot be decompressed ({err})") from None
    if not unpacker.eof:
        raise FormatError(f"{where}: the tensor table is incomplete")
    return text
