"""What the clocks of hosts differ by, from the collectives that their ranks made together.

No member of an all_reduce ends before the last one has entered. Each such call that ranks on two hosts have made bounds what
one clock can be behind the other from both sides; of many calls the tightest bounds stay, and the middle of them is taken. It
is off by at most half of what is between them, which is less than the shortest of these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.view import Calls, View, merged
from unickpt.timing.records import Op

Ints = npt.NDArray[np.int64]
_TOGETHER = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER)  # end for nobody before all are in
_FAR = np.int64(1) << 62


@dataclass(frozen=True, slots=True)
class Offset:
    """Of one host.

    Attributes:
        ns: what its clock is behind the job's: to be added to its times.
        error_ns: by how much that may be off, if both clocks go alike; None if the host has no call in common with others,
            and its clock is taken as it is.
    """

    ns: int
    error_ns: int | None


def clock_offsets(views: Sequence[View]) -> list[Offset]:
    """Of every host against the first one.

    Args:
        views: one for each host, on its own clock.
    """
    if not views:
        return []
    zero = [0] * len(views)
    calls = merged(views, zero, 0).calls  # with the job's numbers of communicators, every host on its own clock
    host = np.repeat(np.arange(len(views)), [len(view.calls) for view in views])
    key, host, entered, ended = _bounds(calls, host)
    found: dict[int, Offset] = {0: Offset(0, 0)}
    offsets = np.zeros(len(views), np.int64)
    while len(found) < len(views):
        known = np.isin(host, list(found))
        last_in = np.full(int(key.max(initial=-1)) + 1, -_FAR)
        first_out = np.full(len(last_in), _FAR)
        moved = offsets[host[known]]
        np.maximum.at(last_in, key[known], entered[known] + moved)
        np.minimum.at(first_out, key[known], ended[known] + moved)
        new = ~known & (last_in[key] > -_FAR)
        low, high = np.full(len(views), -_FAR), np.full(len(views), _FAR)
        np.maximum.at(low, host[new], last_in[key[new]] - ended[new])
        np.minimum.at(high, host[new], first_out[key[new]] - entered[new])
        reached = np.unique(host[new])
        if not len(reached):
            break
        for at in reached.tolist():
            offsets[at] = (int(low[at]) + int(high[at])) // 2
            found[at] = Offset(int(offsets[at]), abs(int(high[at]) - int(low[at])) // 2)
    return [found.get(at, Offset(0, None)) for at in range(len(views))]


def _bounds(calls: Calls, host: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Of every call and host: number of the call, host, when its last rank there came in, when its first was out."""
    over = np.isin(calls["op"], _TOGETHER) & (calls["end_ns"] > 0) & (calls["source"] < 0)
    calls, host = calls[over], host[over]
    if not len(calls):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, nothing
    names = np.stack([calls["comm"].astype(np.int64), calls["seq"].astype(np.int64)], axis=1)
    key = np.unique(names, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((host, key))
    key, host, calls = key[order], host[order], calls[order]
    first = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (host[1:] != host[:-1])])
    return (
        key[first],
        host[first],
        np.maximum.reduceat(calls["call_ns"], first),
        np.minimum.reduceat(calls["end_ns"], first),
    )


def on_one_clock(views: Sequence[View]) -> View:
    """The job, on the clock of the first host."""
    offsets = clock_offsets(views)
    now = max((view.now_ns + offset.ns for view, offset in zip(views, offsets, strict=True)), default=0)
    return merged(views, [offset.ns for offset in offsets], now)
