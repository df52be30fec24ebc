"""Writes that bypass the page cache (``O_DIRECT``), and what the page cache holds.

A new file written through the page cache takes fresh pages for all of its bytes, and the processor zeroes and
fills them. Measured: 0.3 GB/s and a full core through the cache, 1.8 GB/s and one per cent of a core with
``O_DIRECT`` (docs/evidence/benchmarks.md). Direct I/O requires addresses, lengths and file offsets that are
multiples of a block. Unaligned data goes through a small aligned buffer.

Reads do not bypass the cache: there the kernel reads ahead of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

BLOCK_BYTES = 4096
_BOUNCE_BYTES = 4 << 20
_ALL_PAGES, _SAMPLE_PAGES = 256, 15  # a range of more pages is sampled
_CALL_BYTES = 16 << 20
FLAG: int = getattr(os, "O_DIRECT", 0)


def address_of(part: memoryview) -> int:
    """Return the memory address of the first byte of a buffer, or 0 for an empty one."""
    return int(np.frombuffer(part, np.uint8).ctypes.data) if len(part) else 0


_libc = ctypes.CDLL(None, use_errno=True)


def mostly_cached(descriptor: int, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0) -> bool:
    """Return whether the page cache holds most of a range. With ``every``: all of about so many pages of it.

    Linux reports every page of a file as cached to a user that neither owns it nor may write it (``can_do_mincore`` in
    ``mm/mincore.c``).

    ``unknown`` is returned if the system does not tell.
    """
    if not unknown and not _is_told(descriptor):
        return False
    share = _cached_share(descriptor, offset_bytes, size_bytes, every or _SAMPLE_PAGES)
    if share is None:
        return unknown
    return share == 1.0 if every else share > 0.5


def _cached_share(descriptor: int, offset_bytes: int, size_bytes: int, looks: int) -> float | None:
    """Return the share of a range that the page cache holds; None if the system does not tell.

    By ``mincore`` on some of its pages, or on all of a few. A question about every page of a checkpoint takes as long as a
    tenth of its reads. A non-blocking read is no alternative: it triggers read-ahead.
    """
    begin = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset_bytes + size_bytes - begin
    try:
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError):
        return None
    with mapped:
        view = np.frombuffer(mapped, np.uint8)
        address, pages = int(view.ctypes.data), -(-length // mmap.PAGESIZE)
        del view  # a mapping with a live view cannot be closed
        if pages <= _ALL_PAGES:
            return _resident(address, pages) / pages
        places = range(0, pages, max(pages // looks, 1))
        return sum(_resident(address + page * mmap.PAGESIZE, 1) for page in places) / len(places)


def _is_told(descriptor: int) -> bool:
    """Whether this user owns the file or may write it."""
    try:
        owns = os.fstat(descriptor).st_uid == os.geteuid()
        return owns or os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)
    except (OSError, NotImplementedError):
        return False


def _resident(address: int, pages: int) -> int:
    """Return how many pages are in memory; all if the system does not tell."""
    found = (ctypes.c_ubyte * pages)()
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), found) != 0:
        return pages
    return pages - bytes(found).count(0)


class DirectSink:
    """A file that is written sequentially through a descriptor opened with ``O_DIRECT``.

    Block-aligned data is written in place; other data is copied once, into one of two buffers in turn: a thread writes one
    while the caller fills the other. If the file system rejects a direct write, the sink continues through the cache.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._view, self._other = (memoryview(mmap.mmap(-1, _BOUNCE_BYTES)) for _ in range(2))
        self._filled = 0  # bytes in the buffer
        self._at = 0  # bytes written to the file; a multiple of the block while direct
        self._direct = True
        self._writer: _Writer | None = None

    def write(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            left = part
            while len(left):
                left = left[self._take(left) :]

    def _take(self, part: memoryview) -> int:
        """Write or buffer the beginning of a part; return the number of bytes consumed."""
        to_block = -self._filled % BLOCK_BYTES
        aligned = (address_of(part) + to_block) % BLOCK_BYTES == 0
        if aligned and len(part) >= to_block + BLOCK_BYTES:
            self._keep(part[:to_block])
            self._wait()
            self._put(self._view[: self._filled])
            self._filled = 0
            count = (len(part) - to_block) // BLOCK_BYTES * BLOCK_BYTES
            self._put(part[to_block : to_block + count])
            return to_block + count
        count = min(len(part), _BOUNCE_BYTES - self._filled)
        self._keep(part[:count])
        if self._filled == _BOUNCE_BYTES:
            self._write_behind()
        return count

    def _keep(self, part: memoryview) -> None:
        self._view[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def _write_behind(self) -> None:
        """Let the thread write the buffer, after the one before, and go on with the other."""
        self._wait()
        if self._writer is None:
            self._writer = _Writer(self._put)
        self._writer.write(self._view)
        self._view, self._other, self._filled = self._other, self._view, 0

    def _wait(self) -> None:
        """Wait for the thread. Raises what it has raised."""
        if self._writer is not None:
            self._writer.wait()

    def _put(self, part: memoryview) -> None:
        while len(part):
            try:
                written = os.pwrite(self._descriptor, part[:_CALL_BYTES], self._at)
            except OSError as err:
                if err.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_through_cache()
                continue
            self._at += written
            part = part[written:]
            if self._direct and written % BLOCK_BYTES:
                self._go_through_cache()  # after a short write the next one is not aligned

    def _go_through_cache(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~FLAG)
        self._direct = False

    def finish(self) -> None:
        """Write the buffered rest and truncate the file to its true length."""
        self._wait()
        size = self._at + self._filled
        if self._filled:
            padded = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
            self._view[self._filled : padded] = bytes(padded - self._filled)
            self._put(self._view[:padded])
            os.ftruncate(self._descriptor, size)
        self._filled = 0

    def close(self) -> None:
        """End the thread. Nothing is written to the descriptor afterwards."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """A thread that writes one buffer at a time. If none can be started, at the end of the interpreter, the caller writes."""

    def __init__(self, put: Callable[[memoryview], None]) -> None:
        self._put = put
        self._wanted: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="unickpt-write", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def write(self, part: memoryview) -> None:
        """Write a part, after ``wait`` for the one before."""
        if self._thread is None:
            self._put(part)
            return
        self._busy = True
        self._wanted.put(part)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what the write has raised."""
        if self._busy:
            self._busy = False
            error = self._done.get()
            if error is not None:
                raise error

    def close(self) -> None:
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (part := self._wanted.get()) is not None:
            try:
                self._put(part)
            except BaseException as err:  # for the caller
                self._done.put(err)
            else:
                self._done.put(None)
