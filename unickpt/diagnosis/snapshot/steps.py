"""Steps of ranks: their duration, and the own time that a rank did not wait for others.

The host of a rank whose calls end on a device runs ahead of the device. If these calls are timed on the device, so are the
steps, and own times are the device's: computation, and idle time in which the host is late. Calls then belong to the step in
which the host made them. A call in a side stream counts as a wait, although the device may compute beside it: the rank that
the others wait for still waits least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.diagnosis.recording.records import Flag, Op, Phase, Records
from unickpt.diagnosis.snapshot.columns import AT, Columns, Timeline, columns_of, newest_places

# One row per rank and step.
STEP = np.dtype(
    [
        ("rank", "i4"),
        ("number", "u4"),  # of the step
        ("begin_ns", "i8"),  # on the job's clock
        ("end_ns", "i8"),
        ("own_ns", "f8"),  # time without a wait in a call
        ("data_ns", "f8"),  # of that, waits for data
        ("garbage_ns", "f8"),  # of that, garbage collections
        ("long", "u1"),  # whether the rank saved, loaded or evaluated
        ("calls", "u8"),  # equal for ranks that made the same calls
    ]
)
_LONG = int(Phase.CHECKPOINT), int(Phase.EVALUATION)
StepRows = npt.NDArray[Any]  # of dtype ``STEP``


def steps_of(rank: int, records: Records, *, offset_ns: int = 0) -> StepRows:
    """Return the steps of one rank. See ``steps_of_ranks``.

    Args:
        rank: global rank.
        records: records of the rank, the oldest first.
        offset_ns: nanoseconds to add to times of the rank.
    """
    return steps_of_ranks(columns_of({rank: records}), np.array([offset_ns]))


def steps_of_ranks(records: Columns, offsets_ns: Ints, *, newest: int | None = None) -> StepRows:
    """Return the steps of ranks, without steps whose begin may have left the ring, ordered by rank.

    Args:
        records: records of all ranks.
        offsets_ns: nanoseconds to add to times of each rank, int64 ``[r]``.
        newest: how many of each rank; default: all.
    """
    ranks = len(records.ranks)
    flagged = (records["flags"] & int(Flag.TIMED_ON_DEVICE) > 0) & (records["op"] <= Op.RECEIVE)
    if not flagged.any():
        return _steps(records, offsets_ns, newest, on_device=False)
    device = np.zeros(ranks, bool)
    device[records[AT][flagged]] = True
    of_device = device[records[AT]]
    parts = [
        _steps(records.where(of_device), offsets_ns, newest, on_device=True),
        _steps(records.where(~of_device), offsets_ns, newest, on_device=False),
    ]
    every = np.concatenate(parts)
    place = np.argsort(records.ranks)
    found: StepRows = every[np.argsort(place[np.searchsorted(records.ranks, every["rank"], sorter=place)], kind="stable")]
    return found


def _steps(records: Columns, offsets_ns: Ints, newest: int | None, *, on_device: bool) -> StepRows:
    marks = records.where(records["op"] == Op.STEP)
    calls = records.where(records["op"] <= Op.RECEIVE)
    marks = _timed(marks, calls, _oldest(records, records["step"])) if on_device else _whole(marks, records)
    if newest is not None:
        marks = marks.take(newest_places(marks[AT], newest, len(records.ranks)))
    at = marks[AT]
    begin, end = marks["call_ns"], marks["end_ns"]
    timeline = Timeline(records[AT], records["call_ns"], len(records.ranks))
    first, last = timeline.keys(at, begin), timeline.keys(at, end)

    def sums(part: Columns, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not len(part):
            return np.zeros(len(marks), values.dtype)
        if on_device:  # by number, and not by time
            number = _of_step(marks[AT], marks["step"])
            return _sums(_of_step(part[AT], part["step"]), values, number, number + 1)
        return _sums(timeline.keys(part[AT], part["call_ns"]), values, first, last)

    out = np.zeros(len(marks), STEP)
    out["rank"], out["number"] = records.ranks[at], marks["step"]
    out["begin_ns"], out["end_ns"] = begin + offsets_ns[at], end + offsets_ns[at]
    waits = calls["wait_ns"] if on_device else _with_hidden_waits(calls, timeline, first, last)
    out["own_ns"] = end - begin - _waited(calls, waits, timeline, first, last)
    for name, op in (("data_ns", Op.DATA), ("garbage_ns", Op.GARBAGE)):
        part = records.where(records["op"] == op)
        out[name] = sums(part, part["end_ns"] - part["call_ns"])
    aside = records.where((records["phase"] == _LONG[0]) | (records["phase"] == _LONG[1]))
    out["long"] = sums(aside, np.ones(len(aside), np.int64)) > 0
    kinds = calls["op"].astype(np.uint64) << np.uint64(56) ^ calls["elements_in"]
    out["calls"] = sums(calls, _mixed(kinds))  # a sum does not depend on the order
    return out


def _of_step(at: Ints, step: npt.NDArray[np.uint32]) -> Ints:
    """Return int64 ``[n]``: numbers of steps that differ between ranks."""
    return (at << 33) + step


def _oldest(records: Columns, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``[r]``: the value of the oldest record of each rank; 0 without records."""
    at = records[AT]
    places = np.flatnonzero(np.diff(at, prepend=-1))
    found = np.zeros(len(records.ranks), values.dtype)
    found[at[places]] = values[places]
    return found


def _whole(marks: Columns, records: Columns) -> Columns:
    """Return the ends of steps that began after the oldest record. An event is recorded at its end, a call at its begin."""
    oldest_ns = _oldest(records, np.where(records["op"] >= Op.STEP, records["end_ns"], records["call_ns"]))
    return marks.where(marks["call_ns"] >= oldest_ns[marks[AT]])


def _timed(marks: Columns, calls: Columns, oldest_step: npt.NDArray[Any]) -> Columns:
    """Return the ends of steps whose times on the device are known, as are those of all their calls."""
    wanted, known_times = calls["flags"] & int(Flag.TIMED_ON_DEVICE), calls["flags"] & int(Flag.DEVICE_TIMES)
    untimed = (wanted > 0) & (known_times == 0)
    known = (marks["flags"] & int(Flag.DEVICE_TIMES)) > 0
    unknown = np.isin(_of_step(marks[AT], marks["step"]), _of_step(calls[AT][untimed], calls["step"][untimed]))
    return marks.where(known & (marks["step"] > oldest_step[marks[AT]]) & ~unknown)


def _with_hidden_waits(calls: Columns, timeline: Timeline, begin: Ints, end: Ints) -> Ints:
    """Return the begins of waits, with one in the last call of each span if torch's own C++ has made it and it is not known.

    The reducer of ``DistributedDataParallel`` waits inside C++ for the last of its calls, and then the step can go on.
    """
    waits: Ints = calls["wait_ns"]
    if not (calls["flags"] & int(Flag.FROM_NATIVE)).any():
        return waits
    keys = timeline.keys(calls[AT], calls["call_ns"])
    order = np.argsort(keys, kind="stable")
    last = np.searchsorted(keys[order], end) - 1
    last = order[np.unique(last[(last >= 0) & (keys[order[last]] >= begin)])]
    of_reducer = (calls["flags"][last] & int(Flag.FROM_NATIVE)) > 0
    hidden = last[of_reducer & (waits[last] == 0) & (calls["op"][last] <= Op.BARRIER)]
    waits = waits.copy()
    waits[hidden] = calls["call_ns"][hidden]
    return waits


def _waited(calls: Columns, waits: Ints, timeline: Timeline, begin: Ints, end: Ints) -> Ints:
    """Return the nanoseconds of each span, from key to key of the timeline, with a wait in at least one call."""
    over = np.flatnonzero((waits > 0) & (calls["end_ns"] > 0))
    at = calls[AT][over]
    starts, ends = timeline.keys(at, waits[over]), timeline.keys(at, calls["end_ns"][over])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(np.append(0, ends[order]))  # of the first n
    covered = np.append(0, np.cumsum(np.maximum(ends[1:] - np.maximum(starts, ends[:-1]), 0)))

    def until(moment: Ints) -> Ints:
        count = np.searchsorted(starts, moment)
        found: Ints = covered[count] - np.maximum(ends[count] - moment, 0)  # without the part after ``moment``
        return found

    return until(end) - until(begin)


def _sums(
    moments: npt.NDArray[Any], values: npt.NDArray[Any], begin: npt.NDArray[Any], end: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the sum of the values whose times, or steps, are in each span."""
    order = np.argsort(moments, kind="stable")
    sums = np.append(np.zeros(1, values.dtype), np.cumsum(values[order]))
    first, last = np.searchsorted(moments[order], begin), np.searchsorted(moments[order], end)
    found: npt.NDArray[Any] = sums[last] - sums[first]
    return found


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash numbers (last steps of splitmix64) so that sums identify multisets."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
