"""Work that must never delay steering: a bounded queue and a thread. Failures are counted, and the first one is logged."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from unickpt.base.logs import logger, printable

T = TypeVar("T")
MOST = 1000


class Outbox(Generic[T]):
    """Queue of items that a thread takes one after the other. No method raises or waits, but ``close`` for a given time.

    Args:
        what: what is done, for the log.
        take: takes one item; may raise.
        most: items that wait. Further ones are dropped and counted.
        idle_s: time without an item after which ``idle`` is called.
        idle: called in the thread; may raise.

    Attributes:
        failures: number of items that ``take`` has failed on.
        dropped: number of items that were dropped because the queue was full.
    """

    def __init__(
        self,
        what: str,
        take: Callable[[T], None],
        *,
        most: int = MOST,
        idle_s: float | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._what, self._take, self._idle_s, self._idle = what, take, idle_s, idle
        self._items: queue.Queue[T | None] = queue.Queue(most)
        self.failures = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"unickpt-{what}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Add an item."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.dropped += 1
            self._warn(self.dropped, f"{self._items.maxsize} wait already, so one is dropped")

    def close(self, timeout_s: float) -> None:
        """Take what waits, for at most so many seconds."""
        end_s = time.monotonic() + timeout_s
        try:
            self._items.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            try:
                item = self._items.get(timeout=self._idle_s)
                if item is None:
                    return
                self._take(item)
            except queue.Empty:
                self._guarded(self._idle)
            except Exception as err:
                self._failed(err)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as err:
            self._failed(err)

    def _failed(self, err: Exception) -> None:
        self.failures += 1
        self._warn(self.failures, f"{type(err).__name__}: {err}")

    def _warn(self, count: int, why: str) -> None:
        if count in (1, 100) or count % 10_000 == 0:
            logger.warning(
                "unickpt: steering: %s failed (failure %d). Training is not affected (%s)",
                self._what,
                count,
                printable(why[:300]),
            )
