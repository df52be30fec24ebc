"""Sources of timed events: instants on a device that are read after they have passed.

``CudaEvents`` is for NCCL.

Rules of a CUDA event (``c10/cuda/CUDAEvent.h``, ``torch/cuda/graphs.py`` of torch 2.13):

- ``record`` puts a marker into the current stream of the calling thread. It allocates the event the first time; the event
  belongs to that device from then on.
- ``query`` returns whether the device has passed the marker, without waiting. ``elapsed_time`` queries both events again and
  raises if one has not passed, so it does not wait either.
- During a capture with mode ``global`` (the default of ``torch.cuda.graph``) a query on any thread invalidates the graph that
  another thread captures, and an event that is recorded inside of a capture has no time. ``CudaEvents`` therefore counts the
  captures of the process, on all threads, and also asks whether the current stream captures, for captures that begin in C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class TimedEvent(Protocol):
    """An instant, as ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None:
        """Mark the instant in the current stream of this thread."""

    def query(self) -> bool:
        """Return whether the instant has passed. Does not wait."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this instant to a later one. Both must have passed."""


class EventSource(Protocol):
    """What makes events, and knows when they may be used.

    Attributes:
        backends: names of the backends whose calls these events time.
        lock: held while events are recorded and read. No capture begins meanwhile.
    """

    backends: tuple[str, ...]
    lock: threading.Lock

    def make(self) -> TimedEvent:
        """Return a new event."""

    def usable(self) -> bool:
        """Return whether this thread may record and read events now."""

    def place(self) -> int:
        """Return the number of the device whose current stream ``record`` marks."""

    def close(self) -> None:
        """Release what the source has changed."""


class _CudaEvent(torch.cuda.Event):
    """An event that is recorded in the current stream, like any other, but finds that stream in 1 us instead of 6 us.

    ``torch.cuda.current_stream`` makes a new object at each call, and finds out before which device is meant, in Python.
    """

    def record(self, stream: Any = None) -> None:
        if stream is None and _stream_ids is not None:
            stream = _stream(*_stream_ids(torch.cuda.current_device()))
        super().record(stream)


_stream_ids: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)


@functools.lru_cache(64)
def _stream(stream_id: int, device_index: int, device_type: int) -> Any:
    """Return the stream with the numbers that torch gives it, as ``torch.cuda.current_stream`` does."""
    stream: Any = torch.cuda.Stream
    return stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class CudaEvents:
    """Events in the current CUDA stream."""

    backends: tuple[str, ...] = ("nccl",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._captures = 0
        graph: Any = torch.cuda.CUDAGraph
        self._originals = {name: graph.__dict__.get(name) for name in ("capture_begin", "capture_end")}
        graph.capture_begin = self._begins(graph.capture_begin)
        graph.capture_end = self._ends(graph.capture_end)

    def make(self) -> TimedEvent:
        made: TimedEvent = _CudaEvent(enable_timing=True)  # type: ignore[no-untyped-call]
        return made

    def usable(self) -> bool:
        return not self._captures and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    def place(self) -> int:
        return torch.cuda.current_device()

    def close(self) -> None:
        graph: Any = torch.cuda.CUDAGraph
        for name, original in self._originals.items():
            if original is None:  # inherited from the class in C++
                delattr(graph, name)
            else:
                setattr(graph, name, original)

    def _begins(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with self.lock:  # waits for a thread that is reading events now
                self._captures += 1
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._over()
                raise

        capture_begin.__doc__ = original.__doc__
        return capture_begin

    def _ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._over()

        capture_end.__doc__ = original.__doc__
        return capture_end

    def _over(self) -> None:
        with self.lock:
            self._captures = max(self._captures - 1, 0)
