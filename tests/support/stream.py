"""A stream as a device has one: a thread that does its work in order, and events that pass when it comes to them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from unickpt.diagnosis.recording.device_events import TimedEvent


class Stream:
    """Also a source of events (``EventSource``), with everything that was made and a switch for a capture."""

    backends: tuple[str, ...] = ("gloo",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.capturing = False
        self.made: list[StreamEvent] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def kernel(self, seconds: float) -> None:
        self.submit(lambda: time.sleep(seconds))

    def drained(self) -> None:
        done = threading.Event()
        self.submit(done.set)
        assert done.wait(30)

    def make(self) -> TimedEvent:
        self.made.append(StreamEvent(self))
        return self.made[-1]

    def usable(self) -> bool:
        return not self.capturing

    def place(self) -> int:
        return 0

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream, self.at_ns, self.records = stream, 0, 0

    def record(self) -> None:
        self.at_ns, self.records = 0, self.records + 1
        self._stream.submit(self._pass)

    def _pass(self) -> None:
        self.at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return self.at_ns > 0

    def elapsed_time(self, end_event: StreamEvent, /) -> float:
        assert self.query()
        assert end_event.query()  # as torch: it would be an error
        return (end_event.at_ns - self.at_ns) / 1e6
