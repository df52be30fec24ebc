"""Where the elements of a tensor lie in somebody else's file, and how to read some of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from unickpt.dtypes import itemsize_bytes, torch_dtype
from unickpt.errors import FormatError
from unickpt.fragments import Box, strides_of
from unickpt.reading import bytes_of
from unickpt.regular_files import open_regular

MAX_OPEN = 256  # files at a time, but for those that are being read
_GAPS, _SMALL_SPAN_BYTES = 4, 1 << 20  # a span of more elements than this per element that is wanted is read in pieces


@dataclass(slots=True)
class _Opened:
    descriptor: int
    readers: int = 0


class Files:
    """Files that are read at places; some stay open, however many there are. Any thread may read. Close it in the end."""

    def __init__(self) -> None:
        self._open: dict[Path, _Opened] = {}  # those that were wanted last are last
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all of them."""
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
        """Size of a file. Raises FormatError if it is not a regular one, OSError."""
        with self._opened(path) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, path: Path, begin_byte: int, size_bytes: int) -> bytes:
        """Exactly these bytes. Raises as ``read_into``; nothing is allocated for bytes that the file does not have."""
        if begin_byte + size_bytes > self.size_bytes(path):
            raise FormatError(f"{path}: ends within bytes {begin_byte:,} to {begin_byte + size_bytes:,}")
        data = bytearray(size_bytes)
        self.read_into(path, begin_byte, memoryview(data))
        return bytes(data)

    def read_into(self, path: Path, begin_byte: int, into: memoryview) -> None:
        """Fill ``into``. Raises FormatError if the file ends before, OSError."""
        with self._opened(path) as descriptor:
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], begin_byte + done)
                if count <= 0:
                    raise FormatError(f"{path}: ends at byte {begin_byte + done:,}, within a tensor")
                done += count


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor that is still in its file.

    Attributes:
        files, path: through which it is read, and where it is.
        begin_byte: of its first element.
        dtype: by the format's name.
        shape, strides: in elements; all elements lie in the file (whoever makes this has checked it).
    """

    files: Files
    path: Path
    begin_byte: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    def flat(self) -> Located:
        """Its elements in row-major order, if they lie so. Raises FormatError if not."""
        if not self._dense(self.shape):
            raise FormatError(f"{self.path}: a tensor of shape {self.shape} lies there with strides {self.strides}")
        return self._with(self.begin_byte, (self.numel,), (1,))

    def narrow(self, lo: int, hi: int) -> Located:
        """Rows ``[lo, hi)`` of the first dimension. Raises FormatError if they are not all there."""
        if not 0 <= lo <= hi <= self.shape[0]:
            raise FormatError(f"{self.path}: elements {lo:,} to {hi:,} are wanted of {self.shape[0]:,}")
        at = self.begin_byte + lo * self.strides[0] * itemsize_bytes(self.dtype)
        return self._with(at, (hi - lo, *self.shape[1:]), self.strides)

    def view(self, shape: Sequence[int]) -> Located:
        """Another shape of elements that lie in row-major order. Raises FormatError if there are more or less of them."""
        target = tuple(shape)
        if Box.whole(target).numel != self.numel:
            raise FormatError(f"{self.path}: {self.numel:,} elements where {target} is wanted")
        return self.flat()._with(self.begin_byte, target, strides_of(target))

    def at(self, box: Box) -> Located:
        """A box of it, as a tensor of its own."""
        first = sum(at * step for at, step in zip(box.start, self.strides, strict=True))
        return self._with(self.begin_byte + first * itemsize_bytes(self.dtype), box.shape, self.strides)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Elements of a box of it (all of it if not given), 1-D in row-major order."""
        box = Box.whole(self.shape) if box is None else box
        dtype, item = torch_dtype(self.dtype), itemsize_bytes(self.dtype)
        if not box.numel:
            return torch.empty(0, dtype=dtype)
        first = sum(at * step for at, step in zip(box.start, self.strides, strict=True))
        span = 1 + sum((extent - 1) * step for extent, step in zip(box.shape, self.strides, strict=True))
        if span > _GAPS * box.numel and span * item > _SMALL_SPAN_BYTES:
            return self._read_in_pieces(box)
        data = torch.empty(span, dtype=dtype)
        self.files.read_into(self.path, self.begin_byte + first * item, bytes_of(data))
        return data if self._dense(box.shape) else data.as_strided(box.shape, self.strides).reshape(-1)

    def _read_in_pieces(self, box: Box) -> torch.Tensor:
        """A box whose elements lie far apart: halved along the dimension that spans most."""
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
        """Whether a box of this shape lies in row-major order, without gaps."""
        step = 1
        for extent, stride in zip(reversed(shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    def _with(self, begin_byte: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Located:
        return Located(self.files, self.path, begin_byte, self.dtype, shape, strides)
