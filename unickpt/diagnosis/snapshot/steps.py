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
    """Return the steps of a rank, without steps whose begin may have left the ring.

    Args:
        rank: global rank.
        records: records of the rank, the oldest first.
        offset_ns: nanoseconds to add to times of the rank.
    """
    marks = records[records["op"] == Op.STEP]
    calls = records[records["op"] <= Op.RECEIVE]
    on_device = bool((calls["flags"] & int(Flag.TIMED_ON_DEVICE)).any())
    if on_device:
        marks = _timed(marks, calls, records[0]["step"])
    elif len(records):
        oldest = records[0]  # an event is recorded at its end, a call at its begin
        marks = marks[marks["call_ns"] >= (oldest["end_ns"] if oldest["op"] >= Op.STEP else oldest["call_ns"])]
    begin, end = marks["call_ns"], marks["end_ns"]

    def sums(part: Records, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not len(part):
            return np.zeros(len(marks), values.dtype)
        if on_device:
            return _sums(part["step"], values, marks["step"], marks["step"] + np.uint32(1))
        return _sums(part["call_ns"], values, begin, end)

    out = np.zeros(len(marks), STEP)
    out["rank"], out["number"] = rank, marks["step"]
    out["begin_ns"], out["end_ns"] = begin + offset_ns, end + offset_ns
    out["own_ns"] = end - begin - _waited(calls if on_device else _with_hidden_waits(calls, begin, end), begin, end)
    for name, op in (("data_ns", Op.DATA), ("garbage_ns", Op.GARBAGE)):
        part = records[records["op"] == op]
        out[name] = sums(part, part["end_ns"] - part["call_ns"])
    aside = records[(records["phase"] == _LONG[0]) | (records["phase"] == _LONG[1])]
    out["long"] = sums(aside, np.ones(len(aside), np.int64)) > 0
    kinds = calls["op"].astype(np.uint64) << np.uint64(56) ^ calls["elements_in"]
    out["calls"] = sums(calls, _mixed(kinds))  # a sum does not depend on the order
    return out


def _timed(marks: Records, calls: Records, oldest_step: int) -> Records:
    """Return the ends of steps whose times on the device are known, as are those of all their calls."""
    wanted, known_times = calls["flags"] & int(Flag.TIMED_ON_DEVICE), calls["flags"] & int(Flag.DEVICE_TIMES)
    untimed = (wanted > 0) & (known_times == 0)
    known = (marks["flags"] & int(Flag.DEVICE_TIMES)) > 0
    found: Records = marks[known & (marks["step"] > oldest_step) & ~np.isin(marks["step"], calls["step"][untimed])]
    return found


def _with_hidden_waits(calls: Records, begin: Ints, end: Ints) -> Records:
    """Return the calls, with a wait in the last call of each span if torch's own C++ has made it and its wait is not known.

    The reducer of ``DistributedDataParallel`` waits inside C++ for the last of its calls, and then the step can go on.
    """
    if not (calls["flags"] & int(Flag.FROM_NATIVE)).any():
        return calls
    calls = calls[np.argsort(calls["call_ns"], kind="stable")]
    last = np.searchsorted(calls["call_ns"], end) - 1
    last = np.unique(last[(last >= 0) & (calls["call_ns"][last] >= begin)] if len(calls) else last[:0])
    of_reducer = (calls["flags"][last] & int(Flag.FROM_NATIVE)) > 0
    hidden = last[of_reducer & (calls["wait_ns"][last] == 0) & (calls["op"][last] <= Op.BARRIER)]
    calls["wait_ns"][hidden] = calls["call_ns"][hidden]
    return calls


def _waited(calls: Records, begin: Ints, end: Ints) -> Ints:
    """Return the nanoseconds of each span with a wait in at least one call."""
    starts, ends = calls["wait_ns"], calls["end_ns"]
    over = (starts > 0) & (ends > 0)
    starts, ends = starts[over], ends[over]
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
