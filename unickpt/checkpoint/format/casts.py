"""Is a tensor the cast of another one, bit for bit; copies that find this out on the way.

The extension ``_casts`` (``_casts.c``) copies and compares in one pass, past the processor's cache. Without it, such as after
an installation without a compiler, torch and the C library do the same.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain

import torch

from unickpt.base.arrays import Ints
from unickpt.base.extensions import COPYING

_copies, _samples = COPYING.function("copies"), COPYING.function("samples")
_libc = ctypes.CDLL(None)
_memcmp, _memmove = _libc.memcmp, _libc.memmove
_memcmp.argtypes = _memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_BLOCK_BYTES = 256 << 10  # copied, then compared while it is in the cache of the core
_MOST_THREADS = 8  # saturate the memory of a host
_PARTS_PER_THREAD = 4  # so that a slow thread does not delay the others
_DEVICE_PART = 8 << 20  # elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison(IntEnum):
    """What a copy compares its source with. Values as in ``_casts.c``."""

    NOTHING = 0
    BYTES = 1
    BFLOAT16 = 2


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A copy between dense CPU tensors.

    Attributes:
        target, source: tensors of one dtype and one number of elements.
        value: tensor that may be the cast of ``source``, with as many elements; None to compare nothing.
    """

    target: torch.Tensor
    source: torch.Tensor
    value: torch.Tensor | None = None


def available() -> bool:
    """Return whether the extension is installed, with all functions."""
    return _copies is not None and _samples is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a CPU tensor has its elements, in row-major order without gaps."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def comparison(source: torch.dtype, value: torch.dtype) -> Comparison | None:
    """Return how a copy compares; None if no copy compares values of these dtypes."""
    if source == value:
        return Comparison.BYTES
    return Comparison.BFLOAT16 if (source, value) == (torch.float32, torch.bfloat16) else None


def samples(spans: Ints) -> bytes:
    """Return 8 bytes for each tensor that depend on its size, its first and last bytes, and 8 bytes of every 64 KiB.

    A write to a whole tensor changes them. It takes about a hundredth of the time of a copy. Needs the extension.

    Args:
        spans: address and size in bytes of dense CPU tensors. int64 ``[tensors, 2]``.
    """
    return _samples(spans.tobytes()) if len(spans) else b""


def copy_some(copies: Sequence[TensorCopy], positions: range) -> list[bool]:
    """As ``copy_all`` in this thread, of the copies at some positions. Needs the extension. Python's lock is released."""
    return _copied_by_extension(copies, positions)


def copy_all(copies: Sequence[TensorCopy], threads: int, *, extension: bool = True) -> list[bool]:
    """Copy, and return of each copy whether ``value`` is the cast of ``source``; True without a ``value``.

    Args:
        copies: copies without overlap. ``comparison`` of the dtypes of ``source`` and ``value`` is not None.
        threads: number of threads that may copy.
        extension: use the extension if it is there.
    """
    made = partial(_copied_by_extension if extension and _copies is not None else _copied, copies)
    if threads > 1 and len(copies) > 1:
        threads = min(threads, _MOST_THREADS)
        try:
            with ThreadPoolExecutor(threads, "unickpt-copy") as pool:
                return list(chain.from_iterable(pool.map(made, divided(copies, threads * _PARTS_PER_THREAD))))
        except RuntimeError:  # the limit of threads or of memory
            pass
    return made(range(len(copies)))


def divided(copies: Sequence[TensorCopy], parts: int) -> list[range]:
    """Divide the positions of copies into ranges with about the same number of bytes."""
    least = -(-sum(each.source.nbytes for each in copies) // parts)
    found, begin, size = [], 0, 0
    for at, each in enumerate(copies, 1):
        size += each.source.nbytes
        if size >= least or at == len(copies):
            found.append(range(begin, at))
            begin, size = at, 0
    return found


def _kind(copy: TensorCopy) -> Comparison:
    kind = Comparison.NOTHING if copy.value is None else comparison(copy.source.dtype, copy.value.dtype)
    assert kind is not None  # condition of ``copy_all``
    return kind


def _copied_by_extension(copies: Sequence[TensorCopy], positions: range) -> list[bool]:
    table = array("Q")
    for at in positions:
        each = copies[at]
        place = 0 if each.value is None else each.value.data_ptr()
        table.extend((each.target.data_ptr(), each.source.data_ptr(), place, each.source.nbytes, _kind(each)))
    return list(map(bool, _copies(table.tobytes())))


def _copied(copies: Sequence[TensorCopy], positions: range) -> list[bool]:
    return [_copied_by_libraries(copies[at]) for at in positions]


def _copied_by_libraries(copy: TensorCopy) -> bool:
    target, source, value = copy.target.detach(), copy.source.detach(), copy.value
    if not source.nbytes:
        return True
    if _kind(copy) is Comparison.BFLOAT16:
        target.copy_(source)
        assert value is not None
        return is_cast_of(value, target, extension=False)
    return _copied_by_libc(target.data_ptr(), source.data_ptr(), 0 if value is None else value.data_ptr(), source.nbytes)


def _copied_by_libc(target: int, source: int, value: int, size_bytes: int) -> bool:
    """Copy block by block. The source is read from memory once, also if ``value`` is not 0 and compared."""
    if not value:
        _memmove(target, source, size_bytes)
        return True
    same = True
    for at in range(0, size_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, size_bytes - at)
        _memmove(target + at, source + at, size)
        same = same and _memcmp(value + at, source + at, size) == 0
    return same


def is_cast_of(value: torch.Tensor, source: torch.Tensor, *, extension: bool = True) -> bool:
    """Return whether ``value`` equals ``source`` cast to its dtype, bit for bit. Both have the same number of elements.

    Args:
        value, source: tensors of any dtype, on any device. A NaN may count as different if the dtypes differ: there are
            several, and torch does not always make the same one.
        extension: use the extension if it is there.
    """
    value, source = value.detach(), source.detach()
    kind = comparison(source.dtype, value.dtype) if is_dense(value) and is_dense(source) else None
    size = source.numel() * source.element_size()
    if kind is Comparison.BYTES:
        return size == 0 or _memcmp(value.data_ptr(), source.data_ptr(), size) == 0
    if kind is Comparison.BFLOAT16 and extension and _copies is not None:
        return bool(_copies(array("Q", (0, source.data_ptr(), value.data_ptr(), size, kind)).tobytes()) == b"\1")
    return torch.equal(_bits(value), _bits(source.to(value.device, value.dtype).reshape(value.shape)))


def cast_flags(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return ``is_cast_of`` of every pair ``(value, source)``, with one synchronization for all device tensors."""
    flags = [value.is_cpu and is_cast_of(value, source) for value, source in pairs]
    waiting = [at for at, (value, _) in enumerate(pairs) if not value.is_cpu]
    if waiting:
        found = [equal_on_device(*pairs[at]) for at in waiting]
        for at, flag in zip(waiting, torch.stack(found).tolist(), strict=True):
            flags[at] = flag
    return flags


def equal_on_device(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a 0-d bool tensor on the device of ``value``, without synchronization.

    Dense tensors are compared in parts, because a device in training may have no memory for the cast of a large one.
    """
    value, source = value.detach(), source.detach()
    if not (value.is_contiguous() and source.is_contiguous()):
        return _part_equal(value, source.reshape(value.shape))
    parts = zip(torch.split(value.view(-1), _DEVICE_PART), torch.split(source.view(-1), _DEVICE_PART), strict=True)
    return torch.stack([_part_equal(one, other) for one, other in parts]).all()


def _part_equal(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return (_bits(value) == _bits(source.to(value.device, value.dtype, non_blocking=True))).all()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, so that 0.0 differs from -0.0, and a NaN equals the same NaN."""
    return tensor.view(_INTEGERS[tensor.element_size()])
