"""Tensors of other types."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from unickpt import dtypes
from unickpt.converting import Reading
from unickpt.errors import LanguageError, MismatchError
from unickpt.fragments import Box
from unickpt.surgery.selecting import Selection
from unickpt.surgery.table import Table, count_of

_BY_NAME = {str(dtypes.torch_dtype(name)).removeprefix("torch."): name for name in dtypes.names()}


@dataclass(frozen=True, slots=True)
class Cast:
    """Convert elements as ``torch.Tensor.to`` does; of floating point tensors, to floating point types.

    A derived weight stays what it was: where the cast of a master that was rounded is something else, it is stored.

    Attributes:
        selection: of tensors; those of numbers that are not floating point stay as they are.
        dtype: by the format's name.
    """

    selection: Selection
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Cast:
        """Read ``PATTERN=DTYPE``. Raises LanguageError."""
        pattern, equals, name = text.rpartition("=")
        dtype = name.strip().upper() if name.strip().upper() in dtypes.names() else _BY_NAME.get(name.strip().lower(), "")
        floats = [each for each, of in _BY_NAME.items() if is_float(of)]
        if not equals or not dtype or not is_float(dtype):
            raise LanguageError(f"{text!r}: a cast is PATTERN=DTYPE, where DTYPE is {', '.join(floats)}")
        return cls(Selection.parse(pattern), dtype)

    def apply(self, table: Table) -> Table:
        chosen = self.selection.among(table)
        floats = {entry.info.key for entry in chosen if is_float(entry.info.dtype)}
        if not floats:
            raise MismatchError(f"{table.where}: {self.selection.text!r} selects no floating point tensor: nothing can be cast")
        changed = {entry.info.key for entry in chosen if entry.info.key in floats and entry.info.dtype != self.dtype}
        entries = []
        for entry in table.tensors():
            info, parent = entry.info, (entry.info.name, entry.info.derived_from or "")
            if info.key in changed:
                entry = replace(
                    entry, info=replace(info, dtype=self.dtype), read=cast(entry.read, self.dtype),
                    was=entry.told(f"cast from {info.dtype}"),
                )  # fmt: skip
            if info.derived_from is not None and {info.key, parent} & changed:
                entry = replace(entry, differs=(Box.whole(info.shape),))  # found out when it is read
            entries.append(entry)
        others = len(chosen) - len(floats)
        more = f"; {count_of(others)} of other numbers stay as they are" if others else ""
        same = f", {count_of(len(floats) - len(changed))} of it already" if len(changed) < len(floats) else ""
        return table.with_entries(entries).did(f"{count_of(len(changed))} cast to {self.dtype}{same}{more}")


def is_float(dtype: str) -> bool:
    """Whether a type of the format has floating point numbers."""
    return dtypes.torch_dtype(dtype).is_floating_point


def cast(read: Reading, dtype: str) -> Reading:
    """Reading in another type."""
    to = dtypes.torch_dtype(dtype)

    def converted(box: Box) -> torch.Tensor:
        return read(box).to(to)

    return converted
