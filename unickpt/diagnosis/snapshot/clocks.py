"""Clock differences between hosts, from the collectives that their ranks made together.

No member of an all_reduce ends before the last one has entered. Each such call of ranks on two hosts bounds the difference of
their clocks from both sides. The estimate is the middle of the tightest bounds. Its error is at most half of their distance,
which is less than the duration of the shortest of these calls.

A clock that is far from the others is an event of its host: logs, certificates and time-outs of other programs may suffer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.diagnosis.hardware.events import EventKind, HostEvent
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import Calls, Snapshot, merge_snapshots

_TOGETHER = (
    Op.ALL_REDUCE,
    Op.ALL_GATHER,
    Op.REDUCE_SCATTER,
    Op.ALL_TO_ALL,
    Op.BARRIER,
)  # no member ends before all have entered
_FAR = np.int64(1) << 62
APART_NS = 1_000_000_000  # smallest known difference that is told


@dataclass(frozen=True, slots=True)
class Offset:
    """Clock offset of one host.

    Attributes:
        ns: nanoseconds to add to times of this host.
        error_ns: largest error of ``ns``, if both clocks run at the same rate; None if the host has no call in common with
            others. Then ``ns`` is 0.
    """

    ns: int
    error_ns: int | None


def clock_offsets(snapshots: Sequence[Snapshot]) -> list[Offset]:
    """Return the clock offset of every host relative to the first one, from a snapshot of each on its own clock."""
    if not snapshots:
        return []
    zero = [0] * len(snapshots)
    calls = merge_snapshots(snapshots, zero, 0).calls  # with the job's numbers of communicators, every host on its own clock
    host = np.repeat(np.arange(len(snapshots)), [len(snapshot.calls) for snapshot in snapshots])
    key, host, entered, ended = _bounds(calls, host)
    found: dict[int, Offset] = {0: Offset(0, 0)}
    offsets = np.zeros(len(snapshots), np.int64)
    while len(found) < len(snapshots):
        known = np.isin(host, list(found))
        last_in = np.full(int(key.max(initial=-1)) + 1, -_FAR)
        first_out = np.full(len(last_in), _FAR)
        moved = offsets[host[known]]
        np.maximum.at(last_in, key[known], entered[known] + moved)
        np.minimum.at(first_out, key[known], ended[known] + moved)
        new = ~known & (last_in[key] > -_FAR)
        low, high = np.full(len(snapshots), -_FAR), np.full(len(snapshots), _FAR)
        np.maximum.at(low, host[new], last_in[key[new]] - ended[new])
        np.minimum.at(high, host[new], first_out[key[new]] - entered[new])
        reached = np.unique(host[new])
        if not len(reached):
            break
        for at in reached.tolist():
            offsets[at] = (int(low[at]) + int(high[at])) // 2
            found[at] = Offset(int(offsets[at]), abs(int(high[at]) - int(low[at])) // 2)
    return [found.get(at, Offset(0, None)) for at in range(len(snapshots))]


def _bounds(calls: Calls, host: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return for every call and host: number of the call, host, entry of its last rank, end of its first rank."""
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
    return (key[first], host[first], np.maximum.reduceat(calls["call_ns"], first), np.minimum.reduceat(calls["end_ns"], first))


def apart_s(offsets: Sequence[Offset]) -> list[float]:
    """Return by how many seconds the clock of each host is ahead of the others, with its error in favour of it; 0 for a little.

    Of two hosts the first is taken for right, of more their median.
    """
    usual = statistics.median_low([offset.ns for offset in offsets if offset.error_ns is not None]) if len(offsets) > 2 else 0
    found = []
    for offset in offsets:
        ahead_ns, error_ns = usual - offset.ns, offset.error_ns
        known = error_ns is not None and abs(ahead_ns) - error_ns >= APART_NS
        found.append(ahead_ns / 1e9 if known else 0.0)
    return found


def _with_clocks(job: Snapshot, snapshots: Sequence[Snapshot], offsets: Sequence[Offset]) -> Snapshot:
    """Return the snapshot of a job with an event of each host whose clock is far from the others."""
    hardware = dict(job.hardware)
    for snapshot, ahead_s in zip(snapshots, apart_s(offsets), strict=True):
        for host in snapshot.hardware if ahead_s else ():
            event = HostEvent(EventKind.CLOCK_APART, "", job.now_ns, job.now_ns, ahead_s)
            hardware[host] = dataclasses.replace(hardware[host], events=(*hardware[host].events, event))
    return dataclasses.replace(job, hardware=hardware)


def on_one_clock(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Merge the snapshots of all hosts on the clock of the first host."""
    if len(snapshots) == 1:
        return snapshots[0]
    offsets = clock_offsets(snapshots)
    now = max((snapshot.now_ns + offset.ns for snapshot, offset in zip(snapshots, offsets, strict=True)), default=0)
    return _with_clocks(merge_snapshots(snapshots, [offset.ns for offset in offsets], now), snapshots, offsets)
