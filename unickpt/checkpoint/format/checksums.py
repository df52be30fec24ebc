"""Checksums: xxh3 of the ``xxhash`` package, or of the extension ``_checksums``.

xxh3 runs at memory speed (measured: 26 GB/s) and releases the GIL, so verifying every byte of every load costs
a few per cent of a disk read. It detects damage, not manipulation: a checkpoint is data and is never executed.

A fragment is divided into blocks, each with a checksum, so a reader that needs a part of it reads and checks the blocks of this
part. The checksum of the fragment is that of its only block, or else that of the checksums of its blocks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from unickpt.base.extensions import CHECKSUMS, Built

try:
    from unickpt.checkpoint.format import _checksums
except ImportError:
    _checksums = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREFIX = "xxh3_128:"
BLOCK_BYTES = 64 << 10  # of the blocks of a fragment that this release writes
LONG_BYTES = 241  # from this size on, extensions compute checksums; as LONG in ``_xxh3.h``

_FAST = CHECKSUMS.built is Built.READY


def block_count(size_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a fragment. The last one also has the rest. ``block_bytes`` 0: it is one block."""
    return max(size_bytes // block_bytes, 1) if block_bytes else 1


def block_range(first: int, last: int, size_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return begin and end in bytes of the blocks ``[first, last)`` of a fragment."""
    return first * block_bytes, size_bytes if last == block_count(size_bytes, block_bytes) else last * block_bytes


def block_checksums(data: memoryview, block_bytes: int = BLOCK_BYTES) -> array[int]:
    """Return the xxh3_64 of every block of a fragment, 64 bits each. ``data``: the bytes of the fragment, as ``B``."""
    count = block_count(len(data), block_bytes)
    if count == 1:
        return array("Q", [xxhash.xxh3_64_intdigest(data)])
    if _FAST:
        return array("Q", _checksums.block_sums(np.frombuffer(data, np.uint8).ctypes.data, len(data), block_bytes))
    spans = (block_range(at, at + 1, len(data), block_bytes) for at in range(count))
    return array("Q", [xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in spans])


def combined(checksums: array[int]) -> int:
    """Return the checksum of a fragment, as stored in the index, from those of all its blocks."""
    return checksums[0] if len(checksums) == 1 else xxhash.xxh3_64_intdigest(checksums.tobytes())


def fragment_checksum(data: Buffer, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the checksum of a fragment, as stored in the index, from its bytes."""
    return combined(block_checksums(memoryview(data).cast("B"), block_bytes))


def digest(data: Buffer) -> str:
    """Return the xxh3_128 of the bytes of a file, as stored in the manifest: ``xxh3_128:<hex>``."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)


class RunningBlocks:
    """Incremental checksums of adjacent blocks of a fragment.

    Args:
        size_bytes: size of the blocks together. If they do not end with the fragment, it is a multiple of ``block_bytes``.
        block_bytes: as for ``block_count``.
    """

    def __init__(self, size_bytes: int, block_bytes: int) -> None:
        self._size, self._block = size_bytes, block_bytes
        self._count = block_count(size_bytes, block_bytes)
        self._done = array("Q")
        self._at, self._state = 0, xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            end = self._size if len(self._done) + 1 >= self._count else (len(self._done) + 1) * self._block
            part = view[: end - self._at]
            self._state.update(part)
            self._at, view = self._at + len(part), view[len(part) :]
            if self._at == end:
                self._done.append(self._state.intdigest())
                self._state.reset()

    def value(self) -> array[int]:
        """Return the checksums of the blocks, after all bytes."""
        return self._done if self._size else array("Q", [xxhash.xxh3_64_intdigest(b"")])


class RunningDigest:
    """Incremental ``digest``."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def value(self) -> str:
        return PREFIX + self._state.hexdigest()
