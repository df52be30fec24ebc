"""Parser for many entries of a table of tensors at once, without an object per entry.

A job of 100,000 ranks has a table of 500,000 tensors, most of them objects of single ranks. Their entries differ in
their names; the rest of an entry (state, dtype, shape, kind) is one of a few texts. This parser finds entries and names
with a few passes over the bytes, and parses every distinct rest once, as JSON.

It accepts only the text that ``tensor_table.to_text`` writes for names of printable ASCII characters without ``"``,
``\\``, ``!`` and space. It returns None for any other text, valid or not; the caller then parses it as JSON.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.json_text import MAX_VALUES
from unickpt.checkpoint.format.tensor_info import KINDS, MAX_NDIM, TensorInfo

Positions = npt.NDArray[np.int64]
_CHUNK_BYTES = 1 << 20
_MAX_TEXT_BYTES = 1024  # of a name or of the rest of an entry
_MAX_KEY_BYTES = 1 << 28  # of all keys of a table, padded to one width
_MAX_FORMS = 1 << 14  # of one table; a form takes longer than an entry of a list
_ENTRY_VALUES = 8  # what ``parse_json`` counts in an entry, at least
_QUOTE, _COMMA, _OPEN, _CLOSE = b'",[]'


class Forms:
    """Distinct entries without their names, numbered in order of appearance.

    Attributes:
        infos: the entries, with an empty name.
    """

    def __init__(self) -> None:
        self.infos: list[TensorInfo] = []
        self._numbers: dict[bytes, int | None] = {}
        self._key_bytes: list[int] = []

    def number(self, rest: bytes) -> int | None:
        """Return the number of an entry's text from the quote behind its name, or None if the text is unusual or invalid."""
        if rest not in self._numbers and len(self.infos) >= _MAX_FORMS:
            return None
        if rest not in self._numbers:
            info = _form(rest)
            self._numbers[rest] = None if info is None else len(self.infos)
            if info is not None:
                self.infos.append(info)
                self._key_bytes.append(len(info.state.encode()) + 4)
        return self._numbers[rest]

    def key_bytes(self, form: npt.NDArray[np.int32]) -> Positions:
        """Return the length of ``","state"`` for every form."""
        return np.array(self._key_bytes or [0], np.int64)[form]


def _form(rest: bytes) -> TensorInfo | None:
    try:
        entry = json.loads(b'["' + rest)
        if not is_entry(entry) or entry[0] or problem_of(entry[4], entry[2], tuple(entry[3])):
            return None
    except (ValueError, RecursionError, FormatError):
        return None
    _, state, dtype, shape, kind, derived = entry
    info = TensorInfo("", state, dtype, tuple(shape), kind, derived)
    return info if entries_text([info]).encode() == b'["' + rest else None


def is_entry(entry: Any) -> bool:
    """Return whether a JSON value has the form of an entry."""
    if type(entry) is not list or len(entry) != 6:
        return False
    name, state, dtype, shape, kind, derived = entry
    texts = type(name) is type(state) is type(dtype) is type(kind) is str and (derived is None or type(derived) is str)
    return texts and type(shape) is list and all(type(n) is int for n in shape)


@functools.lru_cache(1 << 12)  # a table has few distinct combinations
def problem_of(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return a description of an invalid kind or shape, or ''. Raises FormatError for an unknown dtype."""
    if kind not in KINDS or len(shape) > MAX_NDIM or not all(0 <= n < 2**62 for n in shape):
        return f"has kind {kind!r} and shape {list(shape)}"
    if math.prod(shape) * itemsize_bytes(dtype) >= 2**62:
        return f"of shape {list(shape)} has 2**62 bytes or more"
    return ""


def entries_text(tensors: Sequence[TensorInfo]) -> str:
    """Serialise entries to JSON, separated by commas and without the brackets of the table."""
    entries = [(t.name, t.state, t.dtype, t.shape, t.kind, t.derived_from) for t in tensors]
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of a table as text.

    Attributes:
        text: the entries, separated by commas, without the brackets of the table.
        begin: ``[t]``, position of every entry.
        name_end: ``[t]``, position of the quote behind the name.
        form: int32 ``[t]``, number of the rest of the entry.
        falls: positions of the entries whose (name, state) is not greater than that of the entry before.
        key_bytes: length of the longest key.
    """

    text: bytes
    begin: npt.NDArray[np.integer[Any]]
    name_end: npt.NDArray[np.integer[Any]]
    form: npt.NDArray[np.int32]
    falls: Positions
    key_bytes: int

    def __len__(self) -> int:
        return len(self.begin)

    def name(self, at: int) -> str:
        return self.text[int(self.begin[at]) + 2 : int(self.name_end[at])].decode("ascii")

    def ends(self) -> Positions:
        """Return int64 ``[t]``: the position behind every entry."""
        return np.append(self.begin[1:].astype(np.int64) - 1, len(self.text))[: len(self)]

    def keys(self, forms: Forms, width: int) -> npt.NDArray[np.bytes_]:
        """Return ``[t]`` byte strings that have the order of (name, state)."""
        lengths = self.name_end - self.begin - 2 + forms.key_bytes(self.form)
        return _keys(self.text, self.begin.astype(np.int64) + 2, lengths, width)


def joined(parts: Sequence[Entries]) -> Entries:
    """Concatenate entries. The result has no ``falls``: its order is not known."""
    kept = [part for part in parts if len(part)]
    text = b",".join([part.text for part in kept])
    kind: Any = np.int32 if len(text) < 2**31 else np.int64
    shift = np.cumsum([0, *(len(part.text) + 1 for part in kept)])
    begin, name_end = (np.empty(sum(map(len, kept)), kind) for _ in range(2))
    at = 0
    for part, by in zip(kept, shift, strict=False):
        begin[at : at + len(part)], name_end[at : at + len(part)] = part.begin + by, part.name_end + by
        at += len(part)
    form = np.concatenate([np.zeros(0, np.int32), *(part.form for part in kept)])
    return Entries(text, begin, name_end, form, np.zeros(0, np.int64), max((part.key_bytes for part in kept), default=0))


def scan(text: bytes, forms: Forms) -> Entries | None:
    """Find the entries in the text of a table without its brackets. Return None if the text is unusual or invalid.

    The order of the entries is not checked: see ``Entries.falls``.
    """
    if not text:
        none = np.zeros(0, np.int64)
        return Entries(b"", none, none, none.astype(np.int32), none, 0)
    found: list[tuple[Positions, Positions, npt.NDArray[np.int32], Positions]] = []
    at, count, key_bytes, last = 0, 0, 0, b""
    while at <= len(text):
        cut = text.find(b'],["', at + _CHUNK_BYTES)
        end = len(text) if cut < 0 else cut + 1
        chunk = _scan_chunk(text[at:end], forms)
        if chunk is None:
            return None
        begin, name_end, form, keys = chunk
        falls = np.flatnonzero(keys[1:] <= keys[:-1]) + 1
        if count and bytes(keys[0]) <= last:
            falls = np.append(falls, 0)
        found.append((begin + at, name_end + at, form, falls + count))
        count, key_bytes, last = count + len(begin), max(key_bytes, keys.itemsize), bytes(keys[-1])
        if count * _ENTRY_VALUES > MAX_VALUES:
            return None
        at = end + 1
    begin, name_end, form, falls = (np.concatenate(columns) for columns in zip(*found, strict=True))
    if len(text) < 2**31:
        begin, name_end = begin.astype(np.int32), name_end.astype(np.int32)
    return Entries(text, begin, name_end, form, falls, key_bytes)


def _scan_chunk(data: bytes, forms: Forms) -> tuple[Positions, Positions, npt.NDArray[np.int32], npt.NDArray[np.bytes_]] | None:
    """Return ``(begin, name_end, form, key)`` of the entries, or None.

    Every byte belongs to an entry or is the comma between two of them.
    """
    values = np.frombuffer(data, np.uint8)
    if not data.startswith(b'["') or int(values.min()) < _QUOTE or int(values.max()) >= 0x80 or b"\\" in data:
        return None
    joint = (values[3:] == _QUOTE) & (values[2:-1] == _OPEN) & (values[1:-2] == _COMMA) & (values[:-3] == _CLOSE)
    begin = np.append(0, np.flatnonzero(joint) + 2)
    end = np.append(begin[1:] - 1, len(data))
    quotes = np.flatnonzero(values == _QUOTE)
    second = np.searchsorted(quotes, begin + 2)
    if second[-1] == len(quotes):
        return None
    name_end = quotes[second]
    length = end - name_end
    if int(length.min()) <= 0 or int(length.max()) > _MAX_TEXT_BYTES:
        return None
    form = np.empty(len(begin), np.int32)
    for size in np.flatnonzero(np.bincount(length)).tolist():
        rows = np.flatnonzero(length == size)
        if not _number_rests(_windows(data, size)[name_end[rows]], rows, forms, form):
            return None
    name = begin + 2
    key_length = name_end - name + forms.key_bytes(form)
    width = int(key_length.max())
    if width > 2 * _MAX_TEXT_BYTES or width * len(begin) > 1 << 26:
        return None
    return begin, name_end, form, _keys(data, name, key_length, width)


def _windows(data: bytes, size: int) -> npt.NDArray[np.bytes_]:
    """Return all substrings of ``size`` bytes, as a view."""
    return np.ndarray((len(data) - size + 1,), f"S{size}", data, strides=(1,))


def _number_rests(rests: npt.NDArray[np.bytes_], rows: Positions, forms: Forms, form: npt.NDArray[np.int32]) -> bool:
    """Set ``form[rows]`` to the numbers of texts of one length. Return False if one is unusual or invalid."""
    for _ in range(8):  # usually there are few
        if not len(rows):
            return True
        number = forms.number(bytes(rests[0]))
        if number is None:
            return False
        same = rests == rests[0]
        form[rows[same]] = number
        rows, rests = rows[~same], rests[~same]
    texts, which = np.unique(rests, return_inverse=True)
    numbers = [forms.number(bytes(text)) for text in texts.tolist()]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers) and known:
        form[rows] = np.array(known, np.int32)[which]
    return len(known) == len(numbers)


def _keys(data: bytes, begin: Positions, length: Positions, width: int) -> npt.NDArray[np.bytes_]:
    """Return ``data[begin : begin + length]`` for many ranges, padded with zeros to ``width``.

    A key is the text from the name to the quote behind the state. It sorts like (name, state), because a quote is
    smaller than all other characters that ``scan`` accepts.
    """
    found = np.empty(len(begin), f"S{width}")
    windows = _windows(data + bytes(width), width)
    columns = np.arange(width)
    for lo in range(0, len(begin), 1 << 14):
        part = windows[begin[lo : lo + (1 << 14)]]
        letters = part.view(np.uint8).reshape(len(part), width)
        letters *= columns < length[lo : lo + (1 << 14), None]
        found[lo : lo + (1 << 14)] = part
    return found


def merged(entries: Entries, forms: Forms) -> tuple[Entries, Positions, tuple[int, int] | None] | None:
    """Sort entries by (name, state) and remove duplicates.

    Returns:
        The sorted entries; int64 ``[t]``, the position of every old entry among them; and None, or two old entries that
        have the same (name, state) but differ. None if the keys take too much memory.
    """
    width = max(entries.key_bytes, 1)
    if width * len(entries) > _MAX_KEY_BYTES:
        return None
    keys = entries.keys(forms, width)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    again = np.zeros(len(order), bool)
    again[1:] = keys[1:] == keys[:-1]
    del keys
    clash = again.copy()
    clash[1:] &= entries.form[order[1:]] != entries.form[order[:-1]]
    differ = None
    if clash.any():
        at = int(np.argmax(clash))
        differ = (int(order[at - 1]), int(order[at]))
    position = np.empty(len(order), np.int64)
    position[order] = np.cumsum(~again) - 1
    order = order[~again]
    ends = entries.ends()
    length = (ends - entries.begin)[order]
    cuts = np.append(0, np.flatnonzero(np.diff(order) != 1) + 1)[: len(order)]  # consecutive entries are copied together
    first, last = order[cuts], order[np.append(cuts[1:], len(order))[: len(cuts)] - 1]
    pieces = zip(entries.begin[first].tolist(), ends[last].tolist(), strict=True)
    text = b",".join([entries.text[a:b] for a, b in pieces])
    begin = np.cumsum(length + 1) - length - 1
    name_end = begin + (entries.name_end - entries.begin)[order]
    kind = np.int32 if len(text) < 2**31 else np.int64
    done = Entries(
        text, begin.astype(kind), name_end.astype(kind), entries.form[order], np.zeros(0, np.int64), entries.key_bytes
    )
    return done, position, differ
