"""Reads of adjacent ranges of a file in an order and in blocks that suit the place of their bytes.

From the page cache, as many threads read as there are cores. A disk is read by one thread per file, front to back, while the
kernel reads ahead. Blocks of both fit into the cache of one core, so a checksum does not read them from memory again. A network
has a latency: several threads read large blocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from unickpt.checkpoint.storage.base import Reader, may_be_cached

T = TypeVar("T")
_MANY = 8  # ranges
ReadTurn = contextlib.AbstractContextManager[object]


def cores_of(ranks: int) -> threading.BoundedSemaphore:
    """Return a turn on the processor cores of this rank, if ``ranks`` of this host read at the same time.

    More threads than cores would evict each other's blocks from the cache of a core before the checksum reads them.
    """
    return threading.BoundedSemaphore(core_count(ranks))


def core_count(ranks: int) -> int:
    """Return the number of processor cores of this rank, if ``ranks`` share those of the host."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def in_turns(
    reader: Reader, ranges: Iterable[T], span: Callable[[T], tuple[int, int]], cores: ReadTurn
) -> Iterator[tuple[Sequence[T], ReadTurn]]:
    """Divide the ranges of a file among threads.

    Args:
        reader: the open file.
        ranges: ranges in file order.
        span: offset and size of a range, in bytes.
        cores: the turn on a core (``cores_of``).

    Yields:
        Ranges that one thread reads in order, and the turn that it takes first.
    """
    if not may_be_cached(reader):
        yield from (([each], contextlib.nullcontext()) for each in ranges)
        return
    listed, near = list(ranges), False
    if len(listed) >= _MANY:
        begin, end = span(listed[0])[0], sum(span(listed[-1]))
        near = reader.is_cached(begin, end - begin, True, 2 * len(listed))  # instead of a question for each
    from_disk = []
    for each in listed:
        if near or reader.is_cached(*span(each)):
            yield [each], cores
        else:
            from_disk.append(each)
    if from_disk:
        yield from_disk, contextlib.nullcontext()  # a thread that waits for a disk takes no core


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
