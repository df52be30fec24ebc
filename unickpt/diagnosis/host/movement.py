"""Whether anything moves in a process of this host: its main thread's stack, processor time, input and output, TCP traffic.

The kernel counts what ``read`` and ``write`` move, but not what ``send`` and ``recv`` do: the traffic of the TCP connections is
counted apart (``Traffic``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.process_identity import children_of, stat_fields
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.host.tcp_counters import Connections

_PROC = Path("/proc")
MOVING_BYTES_PER_S = 4096.0  # of a TCP connection; less is what background threads ask of a store
_SAVED_S = 60.0  # seconds of it that a connection may move at once
MOVING_CPU_SHARE = 0.02  # of a processor; less is background threads
LOOP_CPU_SHARE = 0.3  # of a processor that an endless loop uses at least; less is work on an overloaded machine
_MOST_PROCESSES = 256  # of a process and its children


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A look at a process.

    Attributes:
        at_s: time of the look.
        stack: innermost frames of the main thread; empty if unknown.
        cpu_s: processor time of the process and its children.
        io_bytes: bytes that the process has read and written.
        children_s: part of ``cpu_s`` that children have used, for instance compilers.
        tcp_bytes: bytes that have come and gone over its busy TCP connections (``Traffic``).
    """

    at_s: float
    stack: tuple[Frame, ...]
    cpu_s: float
    io_bytes: int
    children_s: float = 0.0
    tcp_bytes: int = 0

    def transfers_since(self, other: ProcessSample) -> bool:
        """Return whether the process has read, written, sent or received more than in passing since an earlier sample."""
        return self.io_bytes != other.io_bytes or self.tcp_bytes > other.tcp_bytes


class Traffic:
    """Bytes that have come and gone over the TCP connections of each rank of this host, without what moves in passing.

    Each connection is judged by itself: a rank that serves a store has one to each other rank, over which background threads
    ask now and then. A transfer has one that is busy. A connection may move ``MOVING_BYTES_PER_S``, also what it has left of
    the last ``_SAVED_S`` seconds at once. What it moves beyond that counts.
    """

    def __init__(self) -> None:
        self._before: dict[int, _Passing] | None = None  # by connection
        self._total: dict[int, int] = {}
        self._at_s = 0.0

    def add(self, connections: Connections, at_s: float) -> None:
        """Add a look. What a connection has moved before its first look counts, if it was not there at the first look."""
        gained = MOVING_BYTES_PER_S * (at_s - self._at_s)
        now: dict[int, _Passing] = {}
        counts = connections["acked"] + connections["received"]
        for rank, here, count in zip(connections["rank"].tolist(), connections["here"].tolist(), counts.tolist(), strict=True):
            before = _Passing(count, MOVING_BYTES_PER_S * _SAVED_S) if self._before is None else self._before.get(here)
            before = before or _Passing(0, MOVING_BYTES_PER_S)
            left = min(before.left + gained, MOVING_BYTES_PER_S * _SAVED_S) - max(count - before.moved, 0)
            now[here] = _Passing(count, max(left, 0.0))
            if left < 0:
                self._total[rank] = self._total.get(rank, 0) + round(-left)
        self._before, self._at_s = now, at_s

    def of(self, rank: int) -> int:
        """Return the bytes of a rank so far."""
        return self._total.get(rank, 0)


@dataclass(frozen=True, slots=True)
class _Passing:
    """A connection at a look: the bytes that it has moved, and those that it may move at once."""

    moved: int
    left: float


def still_s(samples: Sequence[ProcessSample]) -> float:
    """Return for how many seconds, up to the last sample, nothing has moved: stack, processor time, input, output, TCP."""
    if not samples:
        return 0.0
    last = since = samples[-1]
    for sample in itertools.islice(reversed(samples), 1, None):
        used_s = last.cpu_s - sample.cpu_s
        if sample.stack != last.stack or last.transfers_since(sample):
            break
        if used_s > MOVING_CPU_SHARE * (last.at_s - sample.at_s):
            break
        since = sample
    return last.at_s - since.at_s


def same_place_s(samples: Sequence[ProcessSample]) -> float:
    """Return for how many seconds the main thread was in the same functions, without transfers and work of children.

    An endless loop is in one place, and so is a long computation. 0 if the stack is unknown, or if the process uses less than
    ``LOOP_CPU_SHARE`` of a processor, because a loop uses what it gets.
    """
    if not samples or not samples[-1].stack:
        return 0.0
    last = since = samples[-1]
    for sample in itertools.islice(reversed(samples), 1, None):
        if _functions(sample) != _functions(last) or last.transfers_since(sample):
            break
        if last.children_s - sample.children_s > MOVING_CPU_SHARE * (last.at_s - sample.at_s):
            break
        since = sample
    used_s, length_s = last.cpu_s - since.cpu_s, last.at_s - since.at_s
    return length_s if used_s >= LOOP_CPU_SHARE * length_s else 0.0


def _functions(sample: ProcessSample) -> list[tuple[str, str]]:
    return [(frame.file, frame.function) for frame in sample.stack]


def sample(pid: int, at_s: float, stack: tuple[Frame, ...], written_bytes: int = 0, tcp_bytes: int = 0) -> ProcessSample | None:
    """Return a look at a process; None if it cannot be seen.

    Args:
        pid: process number.
        at_s: time of the look.
        stack: innermost frames of the main thread.
        written_bytes: bytes that the process has written because it was looked at. They do not count.
        tcp_bytes: bytes over its TCP connections (``Traffic``).
    """
    try:
        own_s, ended_s = _cpu_s(pid)
        children_s = ended_s + sum(sum(_cpu_s(each)) for each in _family(pid)[1:])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessSample(at_s, stack, own_s + children_s, _io_bytes(pid) - written_bytes, children_s, tcp_bytes)


def _family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    found = [pid]
    for each in found:
        found += children_of(each)
        if len(found) > _MOST_PROCESSES:
            break
    return found[:_MOST_PROCESSES]


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a process, and of its children that have ended."""
    try:
        fields = stat_fields(pid)
    except FileNotFoundError:  # a child has just ended; its time is in its parent's
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks, (int(fields[13]) + int(fields[14])) / ticks


def _io_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written; 0 if unknown."""
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError, IndexError):
        return 0
