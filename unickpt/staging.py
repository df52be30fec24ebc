"""Host memory that a save copies into, so that training goes on while it is written.

Allocated once, touched once and kept: writing into fresh pages costs 20 to 40 times a copy into
warm ones. With a GPU it is pinned and filled on a stream of its own; training's stream waits for
the copies on the device, the host does not.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from unickpt.contribution import Shard
from unickpt.direct_io import BLOCK_BYTES
from unickpt.dtypes import copy_and_compare, is_cast_of

_COMPARED_BYTES = 512 << 10  # copied, then compared: three blocks of this are in a core's own cache


class StagingBuffer:
    """One region of host memory. ``tensor``: uint8 ``[capacity]``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.tensor = _allocated(capacity_bytes + BLOCK_BYTES)  # room for a lead

    def fill(self, shards: Sequence[Shard], *, lead_bytes: int = 0) -> tuple[list[Shard], Callable[[], None]] | None:
        """Copy the shards' data to the front of the buffer, one after the other.

        Args:
            shards: in the order of the file; those without a condition fit together.
            lead_bytes: where the first one begins, so that memory and file are in step block by block.

        Returns:
            Those that are to be written, with data in the buffer, and a function that waits until it is there.
            None if there is no room for all of them.
        """
        targets, sources, staged = [], [], []
        dependents = _dependents(shards)
        told: dict[int, bool] = {}
        at = lead_bytes
        for shard in shards:
            data = shard.data.detach()
            if shard.unless is not None and (told[id(shard)] if id(shard) in told else is_cast_of(data, shard.unless)):
                continue
            at = -(-at // data.element_size()) * data.element_size()
            end = at + data.numel() * data.element_size()
            if end - lead_bytes > self.capacity_bytes:
                return None
            target = self.tensor[at:end].view(data.dtype).view(data.shape)
            staged.append(replace(shard, data=target, unless=None))
            at = end
            dependent = dependents.get((data.data_ptr(), data.numel()))
            if dependent is not None and shard.unless is None and data.is_contiguous():
                told[id(dependent)] = _copy_and_compare(target, data, dependent.data.detach())
            elif data.numel():
                targets.append(target)
                sources.append(data)
        return staged, _copy(targets, sources)


def _allocated(capacity_bytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True)
    region = mmap.mmap(-1, max(capacity_bytes, 1))
    with contextlib.suppress(AttributeError, OSError):  # fewer, larger pages to touch, where the system has them
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    tensor.zero_()
    return tensor


def _dependents(shards: Sequence[Shard]) -> dict[tuple[int, int], Shard]:
    """Shards with a condition, by address and length of what they are compared with, where both can be done at once.

    With several threads torch's own copy is the faster one.
    """
    if torch.get_num_threads() > 1:
        return {}
    conditional = [(shard, shard.unless) for shard in shards if shard.unless is not None]
    return {
        (unless.data_ptr(), unless.numel()): shard
        for shard, unless in conditional
        if unless.is_cpu and shard.data.is_cpu and unless.is_contiguous() and shard.data.is_contiguous() and unless.numel()
    }


def _copy_and_compare(target: torch.Tensor, source: torch.Tensor, value: torch.Tensor) -> bool:
    """Copy; whether ``value`` is the cast of ``source``. Block by block: what is compared is still in the processor's cache."""
    if source.dtype == value.dtype:
        return copy_and_compare(target.data_ptr(), source.data_ptr(), value.data_ptr(), source.numel() * source.element_size())
    target, source, value = target.view(-1), source.view(-1), value.view(-1)
    same, step = True, _COMPARED_BYTES // source.element_size()
    for at in range(0, source.numel(), step):
        length = min(step, source.numel() - at)
        block = target.narrow(0, at, length)
        block.copy_(source.narrow(0, at, length))
        same = same and is_cast_of(value.narrow(0, at, length), block)
    return same


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
    if not any(source.is_cuda for source in sources):
        torch._foreach_copy_(targets, sources)
        return nothing_to_wait_for
    stream, training = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(training)
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    training.wait_stream(stream)  # what comes next on the device must not change the sources before they are copied
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    kept = [sources]  # their memory must not be given to others before the copy

    def wait() -> None:
        event.synchronize()
        kept.clear()

    return wait


def nothing_to_wait_for() -> None:
    """The data are there already."""


def size_of(shards: Sequence[Shard]) -> int:
    """Bytes that the shards take in a buffer."""
    at = 0
    for shard in shards:
        at = -(-at // shard.data.element_size()) * shard.data.element_size() + shard.data.numel() * shard.data.element_size()
    return at


def first_that_fits(shards: Sequence[Shard], capacity_bytes: int) -> int:
    """The first shard from which on all of them fit into a buffer, with room for what alignment takes."""
    room = capacity_bytes
    for at in range(len(shards) - 1, -1, -1):
        room -= shards[at].data.numel() * shards[at].data.element_size() + shards[at].data.element_size() - 1
        if room < 0:
            return at + 1 if size_of(shards) > capacity_bytes else 0
    return 0


@dataclass
class _Held:
    buffer: StagingBuffer
    busy: bool = False


class StagingPool:
    """The staging buffers of a job: at most ``buffers``, together never more than ``budget_bytes``.

    Args:
        budget_bytes: None for as much as the states need.
        buffers: saves that may be under way at a time.
    """

    def __init__(self, budget_bytes: int | None = None, *, buffers: int = 1) -> None:
        self.budget_bytes, self.buffers = budget_bytes, buffers
        self._held: list[_Held] = []
        self._freed = threading.Condition()

    @property
    def capacity_bytes(self) -> int:
        """Of all buffers together."""
        return sum(held.buffer.capacity_bytes for held in self._held)

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> StagingBuffer:
        """A buffer of at least that size, or of the whole budget if that is less; waits until one is free.

        Args:
            size_bytes: of the state.
            notice: called once if it has waited for ``notice_s``.
        """
        wanted = size_bytes if self.budget_bytes is None else min(size_bytes, self.budget_bytes)
        with self._freed:
            while True:
                found = self._free(wanted)
                if found is not None:
                    found.busy = True
                    return found.buffer
                if not self._freed.wait(notice_s) and notice is not None:
                    notice()
                    notice = None

    def release(self, buffer: StagingBuffer) -> None:
        with self._freed:
            for held in self._held:
                if held.buffer is buffer:
                    held.busy = False
            self._freed.notify_all()

    def _free(self, wanted: int) -> _Held | None:
        idle = sorted((h for h in self._held if not h.busy), key=lambda h: h.buffer.capacity_bytes)
        for held in idle:
            if held.buffer.capacity_bytes >= wanted:
                return held
        busy = [h for h in self._held if h.busy]
        taken = sum(h.buffer.capacity_bytes for h in busy)
        if len(busy) >= self.buffers or (self.budget_bytes is not None and taken + wanted > self.budget_bytes):
            return None
        self._held = busy  # those that are too small go before a larger one is made
        idle.clear()
        self._held.append(_Held(StagingBuffer(wanted)))
        return self._held[-1]
