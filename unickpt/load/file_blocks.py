"""Reads of adjacent ranges of a file in blocks that suit the place of their bytes: the page cache, or a disk or a network.

A block from the page cache fits into the cache of one core, so a checksum does not read it from memory again. A block from a
disk is large, because each has a latency.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from unickpt.storage.base import CachedReader, Reader

T = TypeVar("T")
CACHED_BLOCK_BYTES = 256 << 10


def block_bytes_of(reader: Reader, offset_bytes: int, size_bytes: int) -> int:
    """Return the preferred size of one read of a range, in bytes: small if the range is in the page cache."""
    if isinstance(reader, CachedReader) and reader.is_cached(offset_bytes, size_bytes):
        return CACHED_BLOCK_BYTES
    return reader.block_bytes


class Cores:
    """The processor cores of this rank: as many threads at a time work on files that the page cache holds.

    More threads than cores would evict each other's blocks from the cache of a core before the checksum reads them. Threads
    that wait for a disk do not count.

    Args:
        ranks: ranks of this host that read at the same time.
    """

    def __init__(self, ranks: int) -> None:
        self._free = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) // ranks))

    def at(self, block_bytes: int) -> contextlib.AbstractContextManager[object]:
        """Return the block in which a thread reads blocks of this size (``block_bytes_of``)."""
        return self._free if block_bytes == CACHED_BLOCK_BYTES else contextlib.nullcontext()


def read_blocks(
    reader: Reader, offset_bytes: int, views: Iterable[tuple[T, memoryview]], block_bytes: int
) -> Iterator[list[tuple[T, memoryview, bool]]]:
    """Read adjacent ranges of a file, block by block.

    Args:
        reader: the open file.
        offset_bytes: position of the first range.
        views: a label and the memory of each range, in file order.
        block_bytes: size of a block.

    Yields:
        Each block after it has been read: label and memory of its parts, and whether the part is the last one of its range.

    Raises:
        StorageError: the file cannot be read.
    """
    for block in _blocks(views, block_bytes):
        reader.read_into([part for _, part, _ in block], offset_bytes)
        offset_bytes += sum(len(part) for _, part, _ in block)
        yield block


def _blocks(views: Iterable[tuple[T, memoryview]], block_bytes: int) -> Iterator[list[tuple[T, memoryview, bool]]]:
    block: list[tuple[T, memoryview, bool]] = []
    room = block_bytes
    for label, view in views:
        at = 0
        while at < len(view):
            size = min(room, len(view) - at)
            block.append((label, view[at : at + size], at + size == len(view)))
            at, room = at + size, room - size
            if not room:
                yield block
                block, room = [], block_bytes
    if block:
        yield block
