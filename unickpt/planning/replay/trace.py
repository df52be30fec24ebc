"""Calls, steps and pauses of a job on one clock, and the window of steps that is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.base.errors import FormatError

DEFAULT_STEPS, LONGER_STEPS = 20, 64  # newest steps of a window; where those are not like the steps before them
LIKE = 0.05  # largest difference between the mean durations of two windows that are alike, as a share
MOST_CALLS = 1 << 20  # of a longer window

# One row per call of a rank. ``rank`` is a position in ``Trace.ranks``.
CALL = np.dtype(
    [
        ("rank", "i4"),
        ("comm", "i4"),  # position in ``Trace.groups``
        ("source", "i4"),  # global rank, of point-to-point calls; -1 for collectives
        ("destination", "i4"),
        ("root", "i4"),  # global rank, of calls with a root; -1 for others
        ("op", "u1"),  # of ``unickpt.diagnosis.recording.records.Op``
        ("seq", "i8"),  # in the communicator, or in the pair and direction
        ("bytes", "i8"),  # larger of those sent and received
        ("call_ns", "i8"),
        ("wait_ns", "i8"),  # 0 without a wait
        ("end_ns", "i8"),  # 0 if unknown
    ]
)
# One row per step of a rank.
MARK = np.dtype([("rank", "i4"), ("number", "i8"), ("begin_ns", "i8"), ("end_ns", "i8")])
# One row per wait for data, garbage collection and checkpoint in the foreground.
PAUSE = np.dtype([("rank", "i4"), ("op", "u1"), ("begin_ns", "i8"), ("end_ns", "i8")])
CallTable = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TraceGroup:
    """A communicator.

    Attributes:
        label: name of its kind in the framework.
        members: global ranks.
    """

    label: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Records of a job. All times are on the job's clock, in nanoseconds.

    Attributes:
        ranks: int64 ``[ranks]``, global ranks, ascending.
        hosts: host name of each rank.
        places: coordinates of each rank in the parallel layout, such as ``{"tp": 1, "pp": 0}``.
        groups: communicators.
        calls: ``CALL`` table. Calls of one rank are in the order of the program.
        marks: ``MARK`` table.
        pauses: ``PAUSE`` table.
        clock_error_ns: largest error of the alignment of two hosts' clocks; 0 on one host.
    """

    ranks: Ints
    hosts: tuple[str, ...]
    places: tuple[Mapping[str, int], ...]
    groups: Sequence[TraceGroup]
    calls: CallTable
    marks: CallTable
    pauses: CallTable
    clock_error_ns: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a trace.

    Attributes:
        trace: the trace with the calls and pauses of these steps only.
        steps: int64 ``[steps]``, their numbers, ascending.
        begin_ns: int64 ``[ranks]``, begin of the first step on each rank.
        ends_ns: int64 ``[ranks, steps]``, end of each step on each rank.
    """

    trace: Trace
    steps: Ints
    begin_ns: Ints
    ends_ns: Ints

    @property
    def step_ns(self) -> float:
        """Measured duration of a step: mean of all steps and ranks."""
        return float((self.ends_ns[:, -1] - self.begin_ns).mean()) / len(self.steps)


def window_of(trace: Trace, steps: tuple[int, int] | None = None) -> Window:
    """Return the steps that every rank has in its records, without a gap between them: from the first to the last of ``steps``.

    Default: the newest ``DEFAULT_STEPS``; or up to ``LONGER_STEPS``, until they take as long on average, so that slow steps
    which come now and then are there as often as they come.

    Raises:
        FormatError: no such step is known on all ranks.
    """
    numbers, counts = np.unique(trace.marks["number"], return_counts=True)
    whole = numbers[counts == len(trace.ranks)] if len(trace.ranks) else numbers[:0]
    if steps is not None:
        whole = whole[(whole >= steps[0]) & (whole <= steps[1])]
    if len(whole):
        broken = np.flatnonzero(np.diff(whole) != 1)
        whole = whole[broken[-1] + 1 :] if len(broken) else whole
    if steps is None:
        whole = whole[-_enough(trace, whole) :]
    if not len(whole):
        wanted = "no step" if steps is None else f"none of the steps {steps[0]} to {steps[1]}"
        known = f"{numbers[0]} to {numbers[-1]} on some ranks" if len(numbers) else "none"
        raise FormatError(
            f"{wanted} is complete in the records of all {len(trace.ranks)} ranks (steps with records: {known}). The job must "
            "have made more steps, or have larger rings (option timing.records)"
        )
    marks = trace.marks[np.isin(trace.marks["number"], whole)]
    marks = marks[np.lexsort((marks["number"], marks["rank"]))].reshape(len(trace.ranks), len(whole))
    begin, ends = marks["begin_ns"][:, 0].copy(), marks["end_ns"].copy()
    calls, pauses = _within(trace.calls, "call_ns", begin, ends), _within(trace.pauses, "begin_ns", begin, ends)
    return Window(replace(trace, calls=calls, pauses=pauses), whole, begin, ends)


def _enough(trace: Trace, whole: Ints) -> int:
    """Return how many of the newest steps a window needs: a step that comes every so often is in it, in proportion."""
    whole = whole[-LONGER_STEPS:]
    marks = trace.marks[np.isin(trace.marks["number"], whole)]
    begin = marks["begin_ns"].min() if len(marks) else 0
    if len(whole) <= DEFAULT_STEPS or (trace.calls["call_ns"] >= begin).sum() > MOST_CALLS:
        return DEFAULT_STEPS
    at = np.searchsorted(whole, marks["number"])
    took = np.bincount(at, marks["end_ns"] - marks["begin_ns"], len(whole)) / len(trace.ranks)
    means = np.cumsum(took[::-1]) / np.arange(1, len(whole) + 1)  # of the newest n
    like = np.abs(means - means[-1]) <= LIKE * means[-1]
    first = int(np.flatnonzero(~like)[-1]) + 2 if not like.all() else 1  # from which on all means are like that
    return min(max(first, DEFAULT_STEPS), len(whole))


def _within(table: CallTable, column: str, begin: Ints, ends: Ints) -> CallTable:
    moment = table[column]
    found: CallTable = table[(moment >= begin[table["rank"]]) & (moment < ends[table["rank"], -1])]
    return found
