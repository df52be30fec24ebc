"""Pool of staging buffers. They are kept: a copy into fresh pages costs 20 to 40 times a copy into warm ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unickpt.checkpoint.save.staging import StagingBuffer

_SPARE_SHARE, _SPARE_BYTES = 256, 64 << 10  # for objects that grow, such as counters: a new buffer has fresh pages


@dataclass
class _PooledBuffer:
    buffer: StagingBuffer
    busy: bool = False


class BufferPool(Protocol):
    """Source of staging buffers."""

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> StagingBuffer:
        """Return a buffer for data of a size."""

    def release(self, buffer: StagingBuffer) -> None:
        """Take a buffer back."""


class StagingPool:
    """Pool of staging buffers.

    Args:
        budget_bytes: maximum total size; None for as much as the states need.
        buffers: maximum number of buffers, one per concurrent save.
        pinned: as in ``StagingBuffer``.
    """

    def __init__(self, budget_bytes: int | None = None, *, buffers: int = 1, pinned: bool = False) -> None:
        self.budget_bytes, self.buffers, self._pinned = budget_bytes, buffers, pinned
        self._buffers: list[_PooledBuffer] = []
        # Entered itself, and not through the condition: Ctrl-C in the condition's ``__enter__``, which is Python code, would
        # leave it locked.
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)

    @property
    def capacity_bytes(self) -> int:
        """Total size of all buffers."""
        return sum(pooled.buffer.capacity_bytes for pooled in self._buffers)

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> StagingBuffer:
        """Return a buffer of at least the given size, or of the budget if that is smaller. Wait until one is free.

        ``notice`` is called once after a wait of ``notice_s``.
        """
        wanted = size_bytes if self.budget_bytes is None else min(size_bytes, self.budget_bytes)
        with self._lock:
            while True:
                found = self._free(wanted)
                if found is not None:
                    found.busy = True
                    return found.buffer
                if not self._freed.wait(notice_s) and notice is not None:
                    notice()
                    notice = None

    def release(self, buffer: StagingBuffer) -> None:
        with self._lock:
            for pooled in self._buffers:
                if pooled.buffer is buffer:
                    pooled.busy = False
            self._freed.notify_all()

    def _free(self, wanted: int) -> _PooledBuffer | None:
        idle = sorted((h for h in self._buffers if not h.busy), key=lambda h: h.buffer.capacity_bytes)
        for pooled in idle:
            if pooled.buffer.capacity_bytes >= wanted:
                return pooled
        busy = [h for h in self._buffers if h.busy]
        taken = sum(h.buffer.capacity_bytes for h in busy)
        if len(busy) >= self.buffers or (self.budget_bytes is not None and taken + wanted > self.budget_bytes):
            return None
        self._buffers = busy  # free the buffers that are too small before a larger one is allocated
        idle.clear()
        if self.budget_bytes is None:
            wanted += wanted // _SPARE_SHARE + _SPARE_BYTES
        self._buffers.append(_PooledBuffer(StagingBuffer(wanted, pinned=self._pinned)))
        return self._buffers[-1]
