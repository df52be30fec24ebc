"""Steps of ranks: how long they took, and what of it a rank did not spend waiting for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.timing.records import Op, Records

# One row per rank and step.
STEP = np.dtype(
    [
        ("rank", "i4"),
        ("number", "u4"),  # of the step
        ("begin_ns", "i8"),  # on the job's clock
        ("end_ns", "i8"),
        ("own_ns", "f8"),  # time in no call that is waited for
        ("data_ns", "f8"),  # of that, waits for data
        ("garbage_ns", "f8"),  # of that, garbage collections
        ("calls", "u8"),  # equal for ranks that have made the same calls, on whatever host
    ]
)
Steps = npt.NDArray[Any]  # of dtype ``STEP``
Ints = npt.NDArray[np.int64]


def steps_of(rank: int, records: Records, *, offset_ns: int = 0) -> Steps:
    """The steps of a rank; one whose beginning may have left the ring is left out.

    Args:
        rank: whose records they are.
        records: by number, the oldest first.
        offset_ns: what its clock is behind the job's.
    """
    marks = records[records["op"] == Op.STEP]
    if len(records):
        oldest = records[0]  # a moment is noted when it is over, a call when it is made
        marks = marks[marks["call_ns"] >= (oldest["end_ns"] if oldest["op"] >= Op.STEP else oldest["call_ns"])]
    begin, end = marks["call_ns"], marks["end_ns"]
    calls = records[records["op"] <= Op.RECEIVE]
    out = np.zeros(len(marks), STEP)
    out["rank"], out["number"] = rank, marks["step"]
    out["begin_ns"], out["end_ns"] = begin + offset_ns, end + offset_ns
    out["own_ns"] = end - begin - _waited(calls, begin, end)
    for name, op in (("data_ns", Op.DATA), ("garbage_ns", Op.GARBAGE)):
        part = records[records["op"] == op]
        out[name] = _sums(part["call_ns"], part["end_ns"] - part["call_ns"], begin, end)
    kinds = calls["op"].astype(np.uint64) << np.uint64(56) ^ calls["elements_in"]
    out["calls"] = _sums(calls["call_ns"], _mixed(kinds), begin, end)  # of a sum, the order does not matter
    return out


def _waited(calls: Records, begin: Ints, end: Ints) -> Ints:
    """Nanoseconds of each span in which at least one call was waited for."""
    waits = calls[(calls["wait_ns"] > 0) & (calls["end_ns"] > 0)]
    waits = waits[np.argsort(waits["wait_ns"], kind="stable")]
    starts, ends = waits["wait_ns"], np.maximum.accumulate(np.append(0, waits["end_ns"]))  # of the first n
    covered = np.append(0, np.cumsum(np.maximum(ends[1:] - np.maximum(starts, ends[:-1]), 0)))

    def until(moment: Ints) -> Ints:
        count = np.searchsorted(starts, moment)
        found: Ints = covered[count] - np.maximum(ends[count] - moment, 0)  # less what is still to come
        return found

    return until(end) - until(begin)


def _sums(moments: Ints, values: npt.NDArray[Any], begin: Ints, end: Ints) -> npt.NDArray[Any]:
    """Sums of the values whose moments are in each span."""
    order = np.argsort(moments, kind="stable")
    sums = np.append(np.zeros(1, values.dtype), np.cumsum(values[order]))
    first, last = np.searchsorted(moments[order], begin), np.searchsorted(moments[order], end)
    found: npt.NDArray[Any] = sums[last] - sums[first]
    return found


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers whose sums are equal for equal multisets alone, but by chance: the last steps of splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
