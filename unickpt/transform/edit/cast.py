"""Step that changes the dtypes of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from unickpt.base.errors import LanguageError, MismatchError
from unickpt.checkpoint.format import dtype_names, dtypes
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.convert.readings import Reading
from unickpt.transform.edit.patterns import Selection
from unickpt.transform.edit.table import Table, count_of

_BY_NAME = {str(dtype).removeprefix("torch."): name for name, dtype in dtypes.torch_dtypes().items()}


@dataclass(frozen=True, slots=True)
class Cast:
    """Convert floating point tensors to another floating point dtype, as ``torch.Tensor.to`` does.

    A derived weight keeps its values: it is stored where the cast of the rounded master differs.

    Attributes:
        selection: selected tensors. Tensors that are not floating point do not change.
        dtype: format name of the dtype.
    """

    selection: Selection
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Cast:
        """Parse ``PATTERN=DTYPE``. Raises LanguageError."""
        pattern, equals, name = text.rpartition("=")
        dtype = name.strip().upper() if name.strip().upper() in dtype_names.names() else _BY_NAME.get(name.strip().lower(), "")
        floats = [each for each, of in _BY_NAME.items() if is_float(of)]
        if not equals or not dtype or not is_float(dtype):
            raise LanguageError(f"{text!r}: expected PATTERN=DTYPE, where DTYPE is one of {', '.join(floats)}")
        return cls(Selection.parse(pattern), dtype)

    def apply(self, table: Table) -> Table:
        chosen = self.selection.among(table)
        floats = {entry.info.key for entry in chosen if is_float(entry.info.dtype)}
        if not floats:
            raise MismatchError(f"{table.where}: {self.selection.text!r} selects no floating point tensor")
        changed = {entry.info.key for entry in chosen if entry.info.key in floats and entry.info.dtype != self.dtype}
        entries = []
        for entry in table.tensors():
            info, parent = entry.info, (entry.info.name, entry.info.derived_from or "")
            if info.key in changed:
                entry = replace(
                    entry,
                    info=replace(info, dtype=self.dtype),
                    read=cast(entry.read, self.dtype),
                    origin=entry.origin_after(f"cast from {info.dtype}"),
                )
            if info.derived_from is not None and {info.key, parent} & changed:
                entry = replace(entry, overrides=(Box.whole(info.shape),))  # compared when it is read
            entries.append(entry)
        others = len(chosen) - len(floats)
        more = f"; {count_of(others)} not floating point, unchanged" if others else ""
        same = f", {count_of(len(floats) - len(changed))} already of this dtype" if len(changed) < len(floats) else ""
        return table.with_entries(entries).with_done(f"{count_of(len(changed))} cast to {self.dtype}{same}{more}")


def is_float(dtype: str) -> bool:
    """Return whether a format dtype is floating point."""
    return dtypes.torch_dtype(dtype).is_floating_point


def cast(read: Reading, dtype: str) -> Reading:
    """Return a reading that converts to another dtype."""
    to = dtypes.torch_dtype(dtype)

    def converted(box: Box) -> torch.Tensor:
        return read(box).to(to)

    return converted
