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
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    _TORCH_BY_NAME["F8_E8M0"] = torch.float8_e8m0fnu
_NAME_BY_TORCH = {dtype: name for name, dtype in _TORCH_BY_NAME.items()}


def name_of(dtype: torch.dtype, of: str = "") -> str:
    """Return the format name of a torch dtype. ``of`` is the tensor that has it, for the message.

    Raises:
        FormatError: the format cannot store the dtype.
    """
    try:
        return _NAME_BY_TORCH[dtype]
    except KeyError:
        which = f"{of} has dtype {dtype}, which" if of else f"dtype {dtype}"
        raise FormatError(f"{which} cannot be stored; known: {sorted(_TORCH_BY_NAME)}") from None


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtypes that the format can store, by format name: all but those that the installed torch lacks."""
    return dict(_TORCH_BY_NAME)


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
