"""torch counterparts of the dtypes of the format (``dtype_names``)."""

from __future__ import annotations

import torch

from unickpt.base.errors import FormatError

_TORCH_BY_NAME: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAME_BY_TORCH = {dtype: name for name, dtype in _TORCH_BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str:
    """Return the format name of a torch dtype. Raises FormatError if the format cannot store it."""
    try:
        return _NAME_BY_TORCH[dtype]
    except KeyError:
        raise FormatError(f"dtype {dtype} cannot be stored; known: {sorted(_TORCH_BY_NAME)}") from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a format name. Raises FormatError for an unknown name."""
    try:
        return _TORCH_BY_NAME[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown dtype {name!r}; known: {sorted(_TORCH_BY_NAME)}") from None


def byte_view(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a 1-D tensor of bytes.

    torch calls a tensor of one element contiguous whatever its stride, and then refuses to view it as bytes.
    """
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)
