"""Index rows of one rank as a file, and the merge of all of them into the index.

A job can have thousands of ranks, so the cost per rank is small. The rows of a rank are one array, which is only
concatenated. The table of tensors is the same text on all ranks that hold parts of the same tensors, and is parsed
once per text. One sort covers all rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from unickpt.errors import CoverageError, FormatError
from unickpt.format import tensor_table
from unickpt.format.boxes import Ints, sort_order
from unickpt.format.index import MAX_NDIM, FragmentRow, Index, LinearOrder, TensorInfo, blocks, check_boxes
from unickpt.format.safetensors_header import MAX_HEADER_BYTES, Header, build_header, header_bytes_of, parse_header

_FIELDS = 3  # tensor, offset_bytes, checksum; then the starts, then the shapes
_SLOTS = [("rows", "I64", 2), ("tensors", "U8", 1), ("own", "U8", 1)]  # name, dtype, dimensions; in this order


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
    table = np.zeros((len(rows), _FIELDS + 2 * ndim), np.int64)
    table[:, _FIELDS + ndim :] = 1
    table[:, 0] = [ids[row.tensor.key] for row in rows]
    table[:, 1] = [row.offset_bytes for row in rows]
    table[:, 2] = np.array([row.checksum for row in rows], np.uint64).view(np.int64)
    for at, row in enumerate(rows):
        table[at, _FIELDS : _FIELDS + row.box.ndim] = row.box.start
        table[at, _FIELDS + ndim : _FIELDS + ndim + row.box.ndim] = row.box.shape
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
    head, _ = build_header(slots, {"format": "unickpt-rows"})
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
    files, found = [], []
    with tensor_table.collector_paused():
        for name, data in parts:
            files.append(name)
            found.append(reader.rows(data, f"rows of {name}"))
    if len(set(files)) != len(files):
        raise FormatError(f"several ranks wrote to the same file: {sorted({f for f in files if files.count(f) > 1})}")
    file = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in found])
    rows = _joined(found)
    found.clear()
    infos = reader.table.infos
    order = sorted(range(len(infos)), key=lambda at: infos[at].key)
    position = np.empty(len(infos), np.int32)
    position[order] = np.arange(len(infos), dtype=np.int32)
    tensors = tuple(infos[at] for at in order)
    return _sorted(tensors, tuple(files), reader.tensors(file, rows[:, 0], position, files), file, rows)


def _joined(parts: Sequence[Ints]) -> Ints:
    """Concatenate tables, padded to the number of dimensions of the widest one."""
    widest = max((part.shape[1] for part in parts), default=_FIELDS)
    ndim = (widest - _FIELDS) // 2

    def padded(part: Ints) -> Ints:
        if part.shape[1] == widest:
            return part
        own = (part.shape[1] - _FIELDS) // 2
        out = np.zeros((len(part), widest), np.int64)
        out[:, : _FIELDS + own] = part[:, : _FIELDS + own]
        out[:, _FIELDS + ndim :] = 1
        out[:, _FIELDS + ndim : _FIELDS + ndim + own] = part[:, _FIELDS + own :]
        return out

    return np.concatenate([np.zeros((0, widest), np.int64), *map(padded, parts)])


def _sorted(
    tensors: tuple[TensorInfo, ...],
    files: tuple[str, ...],
    tensor: npt.NDArray[np.int32],
    file: npt.NDArray[np.int32],
    rows: Ints,
) -> Index:
    """Sort and validate rows and return them as an index."""
    count, ndim = len(rows), (rows.shape[1] - _FIELDS) // 2
    linear = LinearOrder.of(tensors, ndim)
    order = sort_order(linear.positions(tensor, rows[:, _FIELDS : _FIELDS + ndim]))
    offset, checksum = np.empty(count, np.int64), np.empty(count, np.uint64)
    boxes = np.empty((2 * ndim, count), np.int64)
    for part in blocks(count):  # the numbers of a row are adjacent: each row is fetched from memory once
        block = rows[order[part]]
        offset[part], checksum[part] = block[:, 1], block[:, 2].view(np.uint64)
        boxes[:, part] = block[:, _FIELDS:].T
    index = Index(tensors, files, tensor[order], file[order], offset, checksum, boxes[:ndim].T, boxes[ndim:].T)
    check_boxes(tensors, linear, index.tensor, index.start, index.shape, "the ranks' rows")
    if len(index) and index.offset_bytes.min() < 0:
        raise FormatError("the ranks' rows: negative byte offset")
    return index


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
            raise CoverageError(f"ranks disagree on tensor {info.name} ({info.state}): {self.infos[at]} and {info}")
        return at


class _RankRowsReader:
    """Parser of the rows of many ranks. Headers and tables that ranks have in common are parsed once."""

    def __init__(self) -> None:
        self.table = _TensorNumbers()
        self._headers: dict[bytes, Header] = {}
        self._known: dict[bytes, int] = {}  # text of a shared table -> its position in ``_shared``
        self._shared: list[list[int]] = []  # per shared table: the numbers of its tensors
        self._which: list[int] = []  # per rank: the position of its shared table
        self._own: list[list[int]] = []  # per rank: the numbers of its own tensors

    def rows(self, data: bytes, where: str) -> Ints:
        """Return the rows of one rank, int64 ``[n, 3 + 2 * ndim]``. Raises FormatError, CoverageError."""
        head = data[: header_bytes_of(data[:8], file_bytes=len(data), where=where)]
        header = self._headers.get(head)
        if header is None:
            header = self._headers[head] = _header(data, where)
        rows, tensors, own = header.slots
        if header.header_bytes + own.end_byte != len(data):
            raise FormatError(f"{where}: {len(data)} bytes, expected {header.header_bytes + own.end_byte}")
        text = data[header.header_bytes + tensors.begin_byte : header.header_bytes + tensors.end_byte]
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = len(self._shared)
            infos = tensor_table.from_text(_unpacked(text, where), where=where)
            self._shared.append([self.table.number(info) for info in infos])
        self._which.append(known)
        infos = tensor_table.from_text(data[header.header_bytes + own.begin_byte :], where=where)
        self._own.append([self.table.number(info) for info in infos])
        return np.frombuffer(data, np.int64, rows.shape[0] * rows.shape[1], header.header_bytes).reshape(rows.shape)

    def tensors(
        self, part: npt.NDArray[np.int32], local: Ints, position: npt.NDArray[np.int32], files: Sequence[str]
    ) -> npt.NDArray[np.int32]:
        """Return the tensor numbers of all rows in the merged table, int32 ``[n]``.

        Args:
            part, local: ``[n]``, the rank of every row, and the tensor number that this rank uses.
            position: positions of the tensors of ``table`` in the merged table.
            files: data files of the ranks, for messages.
        """
        lengths = np.array([len(numbers) for numbers in self._shared] or [0], np.int64)
        first = np.cumsum(lengths) - lengths
        own_lengths = np.array([len(numbers) for numbers in self._own] or [0], np.int64)
        own_first = lengths.sum() + np.cumsum(own_lengths) - own_lengths
        which = np.array(self._which or [0], np.int64)
        common, begin = lengths[which], first[which]  # per rank
        flat = position[np.array([n for numbers in (*self._shared, *self._own) for n in numbers], np.int64)]
        known, shift = common + own_lengths, own_first - common
        found = np.empty(len(local), np.int32)
        for rows in blocks(len(local)):
            here, at = part[rows], local[rows]
            wrong = (at < 0) | (at >= known[here])
            if wrong.any():
                row = int(np.argmax(wrong))
                raise FormatError(
                    f"rows of {files[here[row]]}: a fragment refers to tensor {at[row]}, which is not in the table"
                )
            found[rows] = flat[at + np.where(at < common[here], begin[here], shift[here])]
        return found


def _header(data: bytes, where: str) -> Header:
    header = parse_header(data, file_bytes=len(data), where=where)
    slots = [(slot.name, slot.dtype, len(slot.shape)) for slot in header.slots]
    if header.metadata.get("format") != "unickpt-rows" or slots != _SLOTS:
        raise FormatError(f"{where}: not an index-rows file of a rank")
    fields = header.slots[0].shape[1]
    if fields < _FIELDS or (fields - _FIELDS) % 2 or fields > _FIELDS + 2 * MAX_NDIM:
        raise FormatError(f"{where}: rows have {fields} columns")
    return header


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
