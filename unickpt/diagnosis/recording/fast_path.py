"""State of a recorder, and methods of process groups that record the usual calls.

There are two implementations with the same records. The extension ``_fast`` (``_fast.c``) records a usual call in less than a
microsecond. Without it, such as after an installation without a compiler, everything is recorded in Python. Calls that the
extension does not know are recorded in Python in both cases.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from unickpt.diagnosis.recording import processor_counter
from unickpt.diagnosis.recording.records import RECORD, Op
from unickpt.diagnosis.recording.ring import RingWriter

try:
    from unickpt.diagnosis.recording import _fast

    if RECORD.itemsize != _fast.RECORD_BYTES:  # built from another version of the source
        _fast = None  # type: ignore[assignment]
except ImportError:
    _fast = None  # type: ignore[assignment]

# number of the communicator, counter of its collectives, global ranks of the members, counter of a pair of global ranks, and
# the calls given to the device, if that is where they end
GroupState = tuple[int, Iterator[int], tuple[int, ...], Callable[[int, int], Iterator[int]], deque[int] | None]

# methods of process groups, with the arguments that ``torch/distributed/distributed_c10d.py`` gives them
_OPS = {
    "allreduce": Op.ALL_REDUCE,
    "broadcast": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "_allgather_base": Op.ALL_GATHER,
    "all_gather_single": Op.ALL_GATHER,
    "_reduce_scatter_base": Op.REDUCE_SCATTER,
    "reduce_scatter_single": Op.REDUCE_SCATTER,
    "alltoall_base": Op.ALL_TO_ALL,
    "all_to_all_single": Op.ALL_TO_ALL,
    "send": Op.SEND,
    "recv": Op.RECEIVE,
}


class RecorderState(Protocol):
    """State that all code which writes records shares.

    Attributes:
        last: number of the newest record.
        step: training step.
        phase: training phase.
        blocked: if not 0, each call is recorded in Python.
        waits_blocked: the same for waits.
        pending: by the id of work: the work, its records, their flags.
    """

    last: int
    step: int
    phase: int
    blocked: int
    waits_blocked: int

    @property
    def pending(self) -> dict[int, tuple[Any, int | tuple[int, ...], int]]: ...

    def next(self) -> int:
        """Return the number of a new record."""

    def now(self) -> int:
        """Return nanoseconds on the monotonic clock, not less than before."""

    def add_group(self, key: int, group: GroupState, /) -> None:
        """Take note of a process group by its id; only of one whose calls are not timed on a device."""

    def remove_group(self, key: int, /) -> None:
        """Forget a process group, if it was added."""


class PythonRecorderState:
    """``RecorderState`` in Python."""

    __slots__ = ("_numbers", "blocked", "last", "pending", "phase", "step", "waits_blocked")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.last = self.step = self.phase = self.blocked = self.waits_blocked = 0
        self.pending: dict[int, tuple[Any, int | tuple[int, ...], int]] = {}

    def next(self) -> int:
        number = next(self._numbers)  # another thread may do the same
        self.last = max(self.last, number)
        return number

    now = staticmethod(time.monotonic_ns)

    def add_group(self, key: int, group: GroupState, /) -> None:
        """Do nothing: only the extension looks for groups."""

    def remove_group(self, key: int, /) -> None:
        """Do nothing."""


def available() -> bool:
    """Return whether the extension is installed."""
    return _fast is not None


def counter() -> Iterator[int]:
    """Return a counter from 1."""
    return itertools.count(1) if _fast is None else _fast.Counter()


def main_stack_first(fd: int, number: int) -> bool:
    """Let the main thread write its stack before a fatal signal in another thread ends this process.

    The handlers that are there end the process then. Whoever puts back what was before them removes this one, too.

    Args:
        fd: file that it writes to.
        number: signal on which it does so.

    Returns:
        Whether the extension is there to do it.
    """
    if _fast is None or not hasattr(_fast, "main_stack_first"):  # built before it had this
        return False
    _fast.main_stack_first(fd, number)
    return True


def state_of(ring: RingWriter, dtype_codes: dict[torch.dtype, int], *, extension: bool) -> RecorderState:
    """Return the state of a recorder that writes to ``ring``: that of the extension if it is wanted and installed."""
    if _fast is None or not extension:
        return PythonRecorderState()
    import numpy as np

    memory = np.frombuffer(ring.map, np.uint8)
    in_backward = torch._C._current_graph_task_id
    address = memory.ctypes.data + ring.first_byte
    steady = processor_counter.steady_here()
    return _fast.State(memory, address, ring.capacity, ring.identity.rank, dtype_codes, in_backward, steady)


def method(state: RecorderState, name: str, original: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``name`` of process groups that records its calls; ``fallback`` does so in Python."""
    op = _OPS.get(name)
    if op is None or _fast is None or not isinstance(state, _fast.State):
        return fallback
    return _fast.Method(state, original, fallback, int(op))


def wait_method(state: RecorderState, original: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``wait`` of works that records the wait; ``fallback`` does so in Python."""
    if _fast is None or not isinstance(state, _fast.State):
        return fallback
    return _fast.Wait(state, original, fallback)
