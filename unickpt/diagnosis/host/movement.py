"""Whether anything moves in a process of this host: the stack of its main thread, its processor time, its input and output."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.diagnosis.host.stack_dumps import Frame

_PROC = Path("/proc")
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
    """

    at_s: float
    stack: tuple[Frame, ...]
    cpu_s: float
    io_bytes: int
    children_s: float = 0.0


def still_s(samples: Sequence[ProcessSample]) -> float:
    """Return for how many seconds, up to the last sample, nothing has moved: stack, processor time, input and output."""
    if not samples:
        return 0.0
    last = since = samples[-1]
    for sample in itertools.islice(reversed(samples), 1, None):
        used_s = last.cpu_s - sample.cpu_s
        if sample.stack != last.stack or sample.io_bytes != last.io_bytes:
            break
        if used_s > MOVING_CPU_SHARE * (last.at_s - sample.at_s):
            break
        since = sample
    return last.at_s - since.at_s


def same_place_s(samples: Sequence[ProcessSample]) -> float:
    """Return for how many seconds the main thread was in the same functions, without input and output and work of children.

    An endless loop is in one place, and so is a long computation. 0 if the stack is unknown, or if the process uses less than
    ``LOOP_CPU_SHARE`` of a processor, because a loop uses what it gets.
    """
    if not samples or not samples[-1].stack:
        return 0.0
    last = since = samples[-1]
    for sample in itertools.islice(reversed(samples), 1, None):
        if _functions(sample) != _functions(last) or sample.io_bytes != last.io_bytes:
            break
        if last.children_s - sample.children_s > MOVING_CPU_SHARE * (last.at_s - sample.at_s):
            break
        since = sample
    used_s, length_s = last.cpu_s - since.cpu_s, last.at_s - since.at_s
    return length_s if used_s >= LOOP_CPU_SHARE * length_s else 0.0


def _functions(sample: ProcessSample) -> list[tuple[str, str]]:
    return [(frame.file, frame.function) for frame in sample.stack]


def sample(pid: int, at_s: float, stack: tuple[Frame, ...], written_bytes: int = 0) -> ProcessSample | None:
    """Return a look at a process; None if it cannot be seen.

    Args:
        pid: process number.
        at_s: time of the look.
        stack: innermost frames of the main thread.
        written_bytes: bytes that the process has written because it was looked at. They do not count.
    """
    try:
        own_s, ended_s = _cpu_s(pid)
        children_s = ended_s + sum(sum(_cpu_s(each)) for each in _family(pid)[1:])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessSample(at_s, stack, own_s + children_s, _io_bytes(pid) - written_bytes, children_s)


def _family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                with contextlib.suppress(OSError):
                    found += [int(child) for child in (task / "children").read_text().split()]
        if len(found) > _MOST_PROCESSES:
            break
    return found[:_MOST_PROCESSES]


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a process, and of its children that have ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
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
