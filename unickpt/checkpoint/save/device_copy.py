"""Copies from device memory into host memory, behind training, unless the option ``pinned_staging`` is off.

The rules it follows, with their sources in torch 2.13:

- Only page-locked memory is copied without blocking the host. ``pin_memory=True`` would round the buffer up to a power of two
  (``PowerOf2Ceil`` in ``ATen/core/CachingHostAllocator.h``: 33 GB would lock 64 GB) and give the memory back only to its own
  cache. So the region is registered as it is (``cudaHostRegister``, as in ``torch/cuda/_pin_memory_utils.py``), once. If that
  fails, CUDA keeps the error, and the next kernel of training would raise it (``C10_CUDA_KERNEL_LAUNCH_CHECK``): it is cleared.
- Order: the copy stream waits for the training stream, so it copies what training has computed. The training stream then waits
  for the copies, so that nothing that follows in it changes the sources before they are copied: at once, or, for what only a
  step changes, before the next step (``late_copy``). The host waits for neither.
- ``record_stream``: a source that is freed before it is copied is not given to another stream by the caching allocator
  (``c10/cuda/CUDACachingAllocator.cpp``). The training stream is ordered by the wait; other streams are not.
- The thread that writes the file waits for the copies. While another thread captures a CUDA graph in mode ``global``, a call
  such as ``cudaEventSynchronize`` may invalidate the capture. The waiting thread therefore sets its own capture mode to
  ``thread local`` for the time of the wait, as ``CUDAStreamCaptureModeGuard`` does (``c10/cuda/CUDAGraphsC10Utils.h``; Python
  has no access to it).
- Streams and events are made once. Nothing is allocated after the first save, except by torch for a strided source.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.base.logs import logger

SUPPORTED = torch.version.cuda is not None  # not seen with ROCm, whose tensors are "cuda" tensors too
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_PORTABLE = 1  # cudaHostRegisterPortable: locked for the contexts of all devices


@dataclass
class _Lane:
    """Copy stream of one device, and the event behind its newest copies."""

    stream: Any
    event: Any
    in_flight: bool = False


class DeviceCopies:
    """Copies from devices into one region of host memory.

    Args:
        region: uint8 tensor of host memory. It is locked at construction, and unlocked when this object is deleted, after the
            copies.
    """

    def __init__(self, region: torch.Tensor) -> None:
        self._lanes: dict[int, _Lane] = {}
        address, size = region.data_ptr(), region.numel()
        cuda: Any = torch.cuda
        status = int(cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        self.pinned = status == 0
        if self.pinned:
            # keeps the region mapped until it is unlocked; not at exit, when the driver may be gone
            weakref.finalize(self, _unlock, region, self._lanes, torch.cuda.current_device()).atexit = False
        else:
            _clear_error()
            logger.warning(
                "unickpt: %.1f GB of staging memory cannot be locked (cudaHostRegister returned %d; see ulimit -l): the host "
                "waits for the copies of a save",
                size / 1e9,
                status,
            )

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, late: bool = False
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin to copy from CUDA devices into tensors in the region, one for each source.

        Args:
            late: leave it to the caller to order what follows on the devices after the copies.

        Returns:
            A function that waits until the data are in host memory; any thread may call it, once. And one that orders what
            follows in the current streams of the devices after the copies.
        """
        begun: list[_Lane] = []
        for index in sorted({source.get_device() for source in sources}):
            with torch.cuda.device(index):
                lane = self._lanes.get(index)
                if lane is None:
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the waiting thread sleeps
                    lane = self._lanes[index] = _Lane(torch.cuda.Stream(), event)  # type: ignore[no-untyped-call]
                training = torch.cuda.current_stream()
                lane.stream.wait_stream(training)
                with torch.cuda.stream(lane.stream):
                    for target, source in zip(targets, sources, strict=True):
                        if source.get_device() == index:
                            target.copy_(source, non_blocking=True)
                            source.record_stream(lane.stream)
                lane.event.record(lane.stream)
                lane.in_flight = True
                if not late:
                    training.wait_event(lane.event)
            begun.append(lane)
        return functools.partial(_wait, begun), functools.partial(_order, begun)

    def settle(self) -> None:
        """Wait for copies that nothing has waited for: those of a save that was given up."""
        _wait(list(self._lanes.values()))


def _wait(lanes: Sequence[_Lane]) -> None:
    for lane in lanes:
        if lane.in_flight:
            # The thread that waits begins on the first device. Without its lane's, CUDA would make a context there.
            with torch.cuda.device(lane.stream.device), _beside_captures():
                lane.event.synchronize()
            lane.in_flight = False


def _order(lanes: Sequence[_Lane]) -> None:
    """Let the current streams wait for copies. A stream that is being captured cannot; then the host waits."""
    for lane in lanes:
        with torch.cuda.device(lane.stream.device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().wait_event(lane.event)
            else:
                with _beside_captures():
                    lane.event.synchronize()


def _unlock(region: torch.Tensor, lanes: dict[int, _Lane], device: int) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # the device may have failed
        _wait(list(lanes.values()))
        cuda: Any = torch.cuda
        if int(cuda.cudart().cudaHostUnregister(region.data_ptr())):
            _clear_error()


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread wait for an event while another thread captures a graph."""
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # ``mode`` holds the mode before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _exchange_capture_mode() -> Any:
    """Return ``cudaThreadExchangeStreamCaptureMode``; None if it is not found."""
    return getattr(next(iter(_runtimes()), None), "cudaThreadExchangeStreamCaptureMode", None)


def _clear_error() -> None:
    """Forget the error of the last call of the CUDA runtime in this thread."""
    for runtime in _runtimes():
        runtime.cudaGetLastError()
    if not _runtimes():
        with contextlib.suppress(RuntimeError):  # a kernel that raises it, in the place of one of training
            torch.zeros(1, device="cuda").fill_(1.0)


@functools.cache
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    """Return the CUDA runtimes that the process has loaded. Another library may have brought one beside torch's."""
    found: tuple[ctypes.CDLL, ...] = ()
    with contextlib.suppress(OSError):
        names = (line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines())
        found = tuple(map(ctypes.CDLL, dict.fromkeys(name for name in names if "/libcudart.so" in name)))
    if not found:
        logger.warning("unickpt: the CUDA runtime is not found: a CUDA graph that is captured during a save may be invalidated")
    return found
