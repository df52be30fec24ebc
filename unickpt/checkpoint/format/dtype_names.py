"""Names and sizes of the dtypes of the format, without torch: commands that read no tensors start without it.

The names are those of the safetensors specification. The index, the headers of data files, the records of calls and the
command line all use them.
"""

from __future__ import annotations

from unickpt.base.errors import FormatError

# In this order records of calls number them: new ones are added at the end.
_ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip


def names() -> list[str]:
    """Return all dtype names in a fixed order."""
    return list(_ITEMSIZE)


def itemsize_bytes(name: str) -> int:
    """Return the size of one element of a dtype, in bytes. Raises FormatError for an unknown name."""
    try:
        return _ITEMSIZE[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown dtype {name!r}; known: {sorted(_ITEMSIZE)}") from None
