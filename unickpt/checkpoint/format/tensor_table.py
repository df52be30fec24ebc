"""The table of tensors, and its text form in the index and in the index rows of the ranks.

Most tables of large jobs are kept as text with a few numbers per tensor (``table_text.py``): an object per tensor would
take more time and memory than all fragments.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format import table_text
from unickpt.checkpoint.format.json_text import parse_json
from unickpt.checkpoint.format.table_text import Entries, Forms
from unickpt.checkpoint.format.tensor_info import TensorInfo

_KEPT_TENSORS = 1 << 14  # objects of tensors that are kept once made: a load looks at each tensor several times


class TensorTable(Sequence[TensorInfo]):
    """Tensors sorted by (name, state). It compares equal to a sequence of the same tensors.

    Attributes:
        forms: the distinct tensors apart from their names, with an empty name.
        form: int32 ``[t]``, position of every tensor in ``forms``.
    """

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._infos: tuple[TensorInfo, ...] | None = tuple(tensors)
        self._entries: Entries | None = None
        self._made: dict[int, TensorInfo] = {}
        numbers: dict[tuple[Any, ...], int] = {}
        rest = ((t.state, t.dtype, t.shape, t.kind, t.derived_from) for t in self._infos)
        self.form = np.array([numbers.setdefault(each, len(numbers)) for each in rest], np.int32)
        self.forms = tuple(TensorInfo("", *each) for each in numbers)

    @classmethod
    def of(cls, tensors: Iterable[TensorInfo]) -> TensorTable:
        """Return the table of sorted tensors."""
        return tensors if isinstance(tensors, TensorTable) else cls(tensors)

    @classmethod
    def of_entries(cls, entries: Entries, forms: Forms) -> TensorTable:
        """Return the table of sorted entries."""
        table = cls.__new__(cls)
        table._infos, table._entries, table.form, table.forms = None, entries, entries.form, tuple(forms.infos)
        table._made = {}
        return table

    def __len__(self) -> int:
        return len(self.form)

    @overload
    def __getitem__(self, at: int) -> TensorInfo: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TensorInfo, ...]: ...

    def __getitem__(self, at: int | slice) -> TensorInfo | tuple[TensorInfo, ...]:
        if isinstance(at, slice):
            return tuple(self[position] for position in range(*at.indices(len(self))))
        made = self._made.get(at)
        if made is not None:
            return made
        if self._entries is None:
            return self._all()[at]
        at = range(len(self))[at]
        made = _named(self._entries.name(at), self.forms[int(self.form[at])])
        if len(self._made) < _KEPT_TENSORS:
            self._made[at] = made
        return made

    def __iter__(self) -> Iterator[TensorInfo]:
        if self._entries is None:
            return iter(self._all())
        return map(_named, self.names(), map(self.forms.__getitem__, self.form.tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorTable({list(self[:8])}{', ...' if len(self) > 8 else ''})"

    def _all(self) -> tuple[TensorInfo, ...]:
        return self._infos or ()

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors."""
        if self._entries is None:
            yield from (info.name for info in self._all())
            return
        for lo in range(0, len(self), 1 << 14):  # an integer of Python takes more memory than its number
            part = slice(lo, lo + (1 << 14))
            for begin, end in zip(self._entries.begin[part].tolist(), self._entries.name_end[part].tolist(), strict=True):
                yield self._entries.text[begin + 2 : end].decode("ascii")

    def key(self, at: int) -> tuple[str, str]:
        """Return (name, state) of one tensor."""
        return self[at].key

    def find(self, key: tuple[str, str]) -> int | None:
        """Return the position of a (name, state), or None."""
        at = bisect.bisect_left(range(len(self)), key, key=self.key)
        return at if at < len(self) and self.key(at) == key else None

    def numel(self) -> npt.NDArray[np.int64]:
        """Return int64 ``[t]``: the number of elements of every tensor. Tensors of 2**62 elements are not allowed."""
        return np.array([form.numel for form in self.forms] or [0], np.int64)[self.form]

    def total_numel(self) -> int:
        """Return the number of elements of all tensors, of any size."""
        counts = np.bincount(self.form, minlength=len(self.forms)).tolist()
        return sum(count * form.numel for count, form in zip(counts, self.forms, strict=True))

    def where(self, forms: Iterable[bool]) -> npt.NDArray[np.int64]:
        """Return the positions of the tensors whose form is True in ``forms``."""
        return np.flatnonzero(np.array([*forms, False], bool)[self.form])

    def json_string(self) -> tuple[bytes, ...]:
        """Return the table as JSON text that is the value of a string in JSON, in parts."""
        if self._entries is not None:
            return b'"[', self._entries.text.replace(b'"', b'\\"'), b']"'
        return (json.dumps(to_text(self._all()), ensure_ascii=False).encode("utf-8", "backslashreplace"),)

    @cached_property
    def ids(self) -> Mapping[tuple[str, str], int]:
        """Position of every (name, state)."""
        if self._entries is None:
            return {info.key: position for position, info in enumerate(self._all())}
        return _Positions(self)


def _named(name: str, form: TensorInfo) -> TensorInfo:
    return TensorInfo(name, form.state, form.dtype, form.shape, form.kind, form.derived_from)


class _Positions(Mapping[tuple[str, str], int]):
    """Positions of the tensors of a table by (name, state). Objects of ranks are many and looked up rarely: by bisection."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._known = {table.key(at): at for at in table.where(form.kind != "object" for form in table.forms).tolist()}

    def __getitem__(self, key: tuple[str, str]) -> int:
        at = self._known.get(key)
        if at is None and isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key):
            at = self._table.find(key)
        if at is None:
            raise KeyError(key)
        return int(at)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (info.key for info in self._table)

    def __len__(self) -> int:
        return len(self._table)


def to_text(tensors: Sequence[TensorInfo]) -> str:
    """Serialise a sorted table to JSON."""
    return f"[{table_text.entries_text(tensors)}]"


def from_text(text: str | bytes, *, where: str) -> TensorTable:
    """Parse and validate a table.

    Raises:
        FormatError: the text is not JSON of this form, a dtype or kind is unknown, a tensor has 2**62 bytes or more, or
            the table is not sorted by (name, state) or has duplicates.
    """
    if isinstance(text, str) and text.isascii():
        text = text.encode()
    if isinstance(text, bytes) and text[:1] + text[-1:] == b"[]":
        forms = Forms()
        entries = table_text.scan(text[1:-1], forms)
        if entries is not None and not len(entries.falls):
            return TensorTable.of_entries(entries, forms)
    return TensorTable(infos_of_text(text, where=where))


def infos_of_text(text: str | bytes, *, where: str) -> list[TensorInfo]:
    """Parse and validate a table, as ``from_text`` does, into a list.

    Raises:
        FormatError: as for ``from_text``.
    """
    table = json_of(text, where=where)
    if not isinstance(table, list):
        raise FormatError(f"{where}: the tensor table is not a list")
    tensors: list[TensorInfo] = []
    for entry in table:
        if not table_text.is_entry(entry):
            raise FormatError(f"{where}: malformed tensor entry {str(entry)[:200]}")
        name, state, dtype, shape, kind, derived = entry
        info = TensorInfo(name, state, dtype, tuple(shape), kind, derived)
        problem = table_text.problem_of(kind, dtype, info.shape)
        if problem:
            raise FormatError(f"{where}: tensor {name!r} {problem}")
        tensors.append(info)
    if any(a.key >= b.key for a, b in itertools.pairwise(tensors)):
        raise FormatError(f"{where}: the tensor table is not sorted or lists a tensor twice")
    return tensors


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in the block.

    While a large table is built, the collector traverses all of it repeatedly and finds nothing. That took more than
    half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def json_of(text: str | bytes, *, where: str) -> Any:
    """Parse JSON from the metadata of a header. Raises FormatError."""
    return parse_json(
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), where=f"{where}: index metadata"
    )
