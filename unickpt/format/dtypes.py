"""Dtypes of the format: names, sizes and torch counterparts.

The names are those of the safetensors specification. The index, the headers of data files and the command line
all use them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from unickpt.errors import FormatError

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

_memcmp, _memmove = ctypes.CDLL(None).memcmp, ctypes.CDLL(None).memmove
_memcmp.argtypes = _memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_BLOCK_BYTES = 256 << 10  # copied, then compared while it is in the cache of the core


def name_of(dtype: torch.dtype) -> str:
    """Return the format name of a torch dtype. Raises FormatError if the format cannot store it."""
    try:
        return _NAME_BY_TORCH[dtype]
    except KeyError:
        raise FormatError(f"dtype {dtype} cannot be stored; known: {sorted(_TORCH_BY_NAME)}") from None


def names() -> list[str]:
    """Return all dtype names in a fixed order."""
    return list(_TORCH_BY_NAME)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a format name. Raises FormatError for an unknown name."""
    try:
        return _TORCH_BY_NAME[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown dtype {name!r}; known: {sorted(_TORCH_BY_NAME)}") from None


def itemsize_bytes(name: str) -> int:
    """Return the size of one element of a dtype, in bytes."""
    return torch_dtype(name).itemsize


def is_cast_of(value: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether ``value`` equals ``source`` cast to its dtype, bit for bit. Both have the same number of elements.

    Two dense CPU tensors of one dtype are compared by ``memcmp``, which is three times as fast as ``torch.equal``
    and treats equal NaN bits as equal.
    """
    value, source = value.detach(), source.detach()
    if value.dtype != source.dtype:
        return torch.equal(value, source.to(value.device, value.dtype))
    if not (value.is_cpu and source.is_cpu and value.is_contiguous() and source.is_contiguous()):
        return torch.equal(value, source.to(value.device))
    size = value.numel() * value.element_size()
    return size == 0 or _memcmp(value.data_ptr(), source.data_ptr(), size) == 0


def copy_and_compare(target: int, source: int, value: int, size_bytes: int) -> bool:
    """Copy ``size_bytes`` from address ``source`` to ``target`` and return whether ``value`` holds the same bytes.

    The source is read from memory once, which takes two thirds of the time of a copy followed by ``memcmp``.
    """
    same = True
    for at in range(0, size_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, size_bytes - at)
        _memmove(target + at, source + at, size)
        same = same and _memcmp(value + at, source + at, size) == 0
    return same


def cast_flags(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return ``is_cast_of`` of every pair ``(value, source)``, with one synchronization for all device tensors."""
    flags = [value.is_cpu and is_cast_of(value, source) for value, source in pairs]
    waiting = [at for at, (value, _) in enumerate(pairs) if not value.is_cpu]
    if waiting:
        found = [_equal_on_device(*pairs[at]) for at in waiting]
        for at, flag in zip(waiting, torch.stack(found).tolist(), strict=True):
            flags[at] = flag
    return flags


def _equal_on_device(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a 0-d bool tensor on the device of ``value``, without synchronization."""
    return (value.detach() == source.detach().to(value.device, value.dtype, non_blocking=True).view(value.shape)).all()
