"""Memory that a thread reads into before it copies to the outputs.

Copies from page-locked memory to a CUDA device run beside the host (``copy_`` with ``non_blocking``,
``aten/src/ATen/native/cuda/Copy.cu``). For outputs on a device a thread therefore has two blocks of such memory: it reads the
next part of a file into one while the other is copied. The blocks are large, because eight threads that begin copies wait for
the interpreter's lock most of the time: an H100 with 16 processors reads 2.9, 4.9, 8.4, 12 GB/s from memory with blocks of 1,
2, 4, 8 MiB, and 3.3 GB/s with one block of 1 MiB whose copy is waited for (``benchmarks/gpu_checks/staging.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

BLOCK_BYTES = 1 << 20
_DEVICE_BLOCK_BYTES = 8 << 20  # 128 MiB in eight threads, which torch keeps for later


class Scratch(Protocol):
    """Blocks of one thread.

    Attributes:
        block_bytes: smallest size of a block that suits the copies.
    """

    block_bytes: int

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a block of ``count`` elements, 1-D, that no copy reads any more."""

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the block that was taken last is copied to the outputs, by ``copy``."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a part of the block, or begin to.

        Args:
            target: part of an output, in any layout and dtype.
            source: part of the block, of the same shape.
        """

    def close(self) -> None:
        """Wait for the copies. Also after an error, the outputs may be freed only then."""


class HostScratch:
    """One block in ordinary memory."""

    block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        size = count * dtype.itemsize
        if len(self._block) < size:
            self._block = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._block[:size].view(dtype)

    def copying(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def close(self) -> None:
        """Nothing is under way."""


class DeviceScratch:
    """Two blocks in page-locked memory.

    A thread begins on the first device. Calls that CUDA makes for the current device are made with the stream's, because CUDA
    would otherwise make a context on the first one, of 0.5 GB for each rank of the host.

    Args:
        streams: stream of each device for the copies. Threads share them: a device copies one block at a time anyway, and what
            copies need on the device is used again by the next one.
    """

    block_bytes = _DEVICE_BLOCK_BYTES

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self._blocks = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._copied = [[torch.cuda.Event() for _ in self._streams] for _ in self._blocks]  # type: ignore[no-untyped-call]
        self._at = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        self._at, size = 1 - self._at, count * dtype.itemsize
        for event, stream in zip(self._copied[self._at], self._streams, strict=True):
            with torch.cuda.device(stream.device):
                event.synchronize()  # returns at once before the first copy
        if len(self._blocks[self._at]) < size:  # torch keeps freed blocks for later, and knows of the copies from them
            self._blocks[self._at] = torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        return self._blocks[self._at][:size].view(dtype)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with contextlib.ExitStack() as current:
            for stream in self._streams:
                current.enter_context(torch.cuda.device(stream.device))
                current.enter_context(torch.cuda.stream(stream))
            yield
            for event, stream in zip(self._copied[self._at], self._streams, strict=True):
                event.record(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_cuda and (source.dtype != target.dtype or not target.is_contiguous()):
            source = source.to(target.device, non_blocking=True)  # older releases of torch would cast it on the host
        target.copy_(source, non_blocking=target.is_cuda)

    def close(self) -> None:
        for stream in self._streams:
            with torch.cuda.device(stream.device):
                stream.synchronize()


class Scratches:
    """The scratch of each thread that reads for some outputs."""

    def __init__(self, outs: Iterable[torch.Tensor]) -> None:
        devices = {out.device for out in outs if out.is_cuda}
        self._streams: list[Any] = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self._of_thread = threading.local()
        self._all: list[Scratch] = []

    def mine(self) -> Scratch:
        """Return the scratch of this thread."""
        found: Scratch | None = getattr(self._of_thread, "scratch", None)
        if found is None:
            found = self._of_thread.scratch = DeviceScratch(self._streams) if self._streams else HostScratch()
            self._all.append(found)
        return found

    def close(self) -> None:
        """Wait for the copies of all threads. None of them reads any more."""
        for scratch in self._all:
            scratch.close()
