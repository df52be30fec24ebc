"""Tensors that are still in a file of another program, and reads of parts of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box, strides_of
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.load.checked_read import bytes_of
from unickpt.transform.convert.pickles.regular_files import open_regular

MAX_OPEN = 256  # files kept open, not counting those being read
_GAPS, _SMALL_SPAN_BYTES = 4, 1 << 20  # a span with more elements than this per requested element is read in pieces


@dataclass(slots=True)
class _Opened:
    descriptor: int
    readers: int = 0


class OpenFiles:
    """A cache of open files, read at given offsets. Threads may share it. Close it when done."""

    def __init__(self) -> None:
        self._open: dict[Path, _Opened] = {}  # most recently used last
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._open.values():
                os.close(file.descriptor)
            self._open = {}

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        with self._lock:
            file = self._open.pop(path, None) or _Opened(open_regular(path))
            self._open[path] = file
            file.readers += 1
            idle = [each for each, other in self._open.items() if not other.readers]
            for other in idle[: max(len(self._open) - MAX_OPEN, 0)]:
                os.close(self._open.pop(other).descriptor)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.readers -= 1

    def size_bytes(self, path: Path) -> int:
        """Return the size of a file. Raises FormatError if it is not a regular file, and OSError."""
        with self._opened(path) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, path: Path, begin_byte: int, size_bytes: int) -> bytes:
        """Return exactly these bytes. Raises as ``read_into``, before it allocates memory for missing bytes."""
        if begin_byte + size_bytes > self.size_bytes(path):
            raise FormatError(f"{path}: the file ends before byte {begin_byte + size_bytes:,} (read from byte {begin_byte:,})")
        data = bytearray(size_bytes)
        self.read_into(path, begin_byte, memoryview(data))
        return bytes(data)

    def read_into(self, path: Path, begin_byte: int, into: memoryview) -> None:
        """Fill ``into``. Raises FormatError if the file ends too early, and OSError."""
        with self._opened(path) as descriptor:
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], begin_byte + done)
                if count <= 0:
                    raise FormatError(f"{path}: the file ends at byte {begin_byte + done:,}, within a tensor")
                done += count


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor that is still in its file.

    Attributes:
        files, path: cache and file to read from.
        begin_byte: offset of the first element.
        dtype: format name of the dtype.
        shape, strides: in elements. The creator has checked that all elements are within the file.
    """

    files: OpenFiles
    path: Path
    begin_byte: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    def flat(self) -> Located:
        """Return the elements as 1-D. Raises FormatError if they are not stored in row-major order."""
        if not self._dense(self.shape):
            raise FormatError(
                f"{self.path}: a tensor of shape {self.shape} has strides {self.strides}; expected row-major order"
            )
        return self._with(self.begin_byte, (self.numel,), (1,))

    def narrow(self, lo: int, hi: int) -> Located:
        """Return rows ``[lo, hi)`` of the first dimension. Raises FormatError if they are out of range."""
        if not 0 <= lo <= hi <= self.shape[0]:
            raise FormatError(f"{self.path}: rows {lo:,} to {hi:,} are out of range; the tensor has {self.shape[0]:,}")
        at = self.begin_byte + lo * self.strides[0] * itemsize_bytes(self.dtype)
        return self._with(at, (hi - lo, *self.shape[1:]), self.strides)

    def view(self, shape: Sequence[int]) -> Located:
        """Return another shape of elements in row-major order. Raises FormatError if the number of elements differs."""
        target = tuple(shape)
        if Box.whole(target).numel != self.numel:
            raise FormatError(f"{self.path}: {self.numel:,} elements cannot have the shape {target}")
        return self.flat()._with(self.begin_byte, target, strides_of(target))

    def at(self, box: Box) -> Located:
        """Return a box of the tensor as a tensor."""
        return self._with(self._byte(box), box.shape, self.strides)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Read a box of the tensor (default: all of it). Returns elements, 1-D in row-major order."""
        box = Box.whole(self.shape) if box is None else box
        dtype, item = torch_dtype(self.dtype), itemsize_bytes(self.dtype)
        if not box.numel:
            return torch.empty(0, dtype=dtype)
        span = 1 + sum((extent - 1) * step for extent, step in zip(box.shape, self.strides, strict=True))
        if span > _GAPS * box.numel and span * item > _SMALL_SPAN_BYTES:
            return self._read_in_pieces(box)
        data = torch.empty(span, dtype=dtype)
        self.files.read_into(self.path, self._byte(box), bytes_of(data))
        return data if self._dense(box.shape) else data.as_strided(box.shape, self.strides).reshape(-1)

    def read_into(self, box: Box, target: torch.Tensor) -> None:
        """Read a box of the tensor into a contiguous 1-D tensor. Raises FormatError if it has another dtype or size."""
        if (target.dtype, target.numel()) != (torch_dtype(self.dtype), box.numel):
            raise FormatError(
                f"{self.path}: has {box.numel:,} elements of {self.dtype}, expected {target.numel():,} of {target.dtype}"
            )
        if self._dense(box.shape):
            self.files.read_into(self.path, self._byte(box), bytes_of(target))
        else:
            target.copy_(self.read(box))

    def _byte(self, box: Box) -> int:
        """Return the offset of the first element of a box."""
        first = sum(at * step for at, step in zip(box.start, self.strides, strict=True))
        return self.begin_byte + first * itemsize_bytes(self.dtype)

    def _read_in_pieces(self, box: Box) -> torch.Tensor:
        """Read a box whose elements are far apart: halve it along the dimension with the largest span."""
        spans = [(extent - 1) * step for extent, step in zip(box.shape, self.strides, strict=True)]
        dim = max(range(box.ndim), key=spans.__getitem__)
        half = box.shape[dim] // 2
        pieces = []
        for lo, hi in ((0, half), (half, box.shape[dim])):
            start = (*box.start[:dim], box.start[dim] + lo, *box.start[dim + 1 :])
            part = Box(start, (*box.shape[:dim], hi - lo, *box.shape[dim + 1 :]))
            pieces.append(self.read(part).view(part.shape))
        return torch.cat(pieces, dim).reshape(-1)

    def _dense(self, shape: Sequence[int]) -> bool:
        """Return whether a box of this shape is contiguous in row-major order."""
        step = 1
        for extent, stride in zip(reversed(shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    def _with(self, begin_byte: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Located:
        return Located(self.files, self.path, begin_byte, self.dtype, shape, strides)
