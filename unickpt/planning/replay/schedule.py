"""Order in which the nodes of a graph can be computed, and the computation of their times.

The chain of a host is cut at its returns. Between two returns only the own times add up, so a *segment* of the chain is one
node: it begins when the host returns from a wait. Transfers and segments are sorted by level: the nodes of one level depend on
earlier levels only, and are computed together, for several changes of the durations at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.base.errors import FormatError
from unickpt.planning.replay.graph import RETURNS, STEP_ENDS, Graph


@dataclass(frozen=True, slots=True)
class Levels:
    """Nodes by level. Positions in ``segments`` and ``transfers`` are by level too.

    Attributes:
        segments: int64 ``[segments]``, number of each segment in the order of the hosts.
        transfers: int64 ``[transfers]``, number of each transfer in the graph.
        segment_levels, transfer_levels: first position of each level, and the end.
        segment_of_event: int64 ``[events]``, position of the segment of each event.
        first_event: int64 ``[segments]``, first event of each segment; its own time is a delay after the transfer, or, for the
            first segment of a host, an ordinary own time.
        last_event: int64 ``[segments]``.
        previous: int64 ``[segments]``, position of the segment before it on its host; -1 for the first.
        waits_for: int64 ``[segments]``, position of the transfer that it begins with; -1 for the first.
        before: int64 ``[transfers]``, position of the transfer before it; -1 for none.
        event: int64 ``[needs]``, events that the transfers need, by position of the transfer.
        need_starts: int64 ``[transfers + 1]``, first need of each transfer.
    """

    segments: Ints
    transfers: Ints
    segment_levels: Ints
    transfer_levels: Ints
    segment_of_event: Ints
    first_event: Ints
    last_event: Ints
    previous: Ints
    waits_for: Ints
    before: Ints
    event: Ints
    need_starts: Ints


def schedule_of(graph: Graph) -> Levels:
    """Return the levels of a graph.

    Raises:
        FormatError: calls wait for each other in a circle, so that the records cannot be of one job.
    """
    events, moved = graph.events, graph.transfers
    new_rank = np.append(True, events.rank[1:] != events.rank[:-1])
    begins = new_rank | (events.kind == RETURNS)
    segment = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(segment)) - 1
    starts = new_rank[first] & (events.kind[first] != RETURNS)  # a host's chain begins here
    previous = np.where(new_rank[first], -1, np.arange(len(first)) - 1)
    waits_for = np.where(starts, -1, events.transfer[first])
    need_segment = segment[moved.event]
    levels_s, levels_t = _levels(previous, waits_for, moved.before, moved.need, need_segment)
    if (levels_s < 0).any() or (levels_t < 0).any():
        raise FormatError(
            f"{int((levels_t < 0).sum())} of {len(levels_t)} transfers wait for each other in a circle: the records are not of "
            "one start of one job, or the clocks of its hosts cannot be aligned"
        )
    by_s, by_t = np.argsort(levels_s, kind="stable"), np.argsort(levels_t, kind="stable")
    at_s, at_t = np.append(_inverse(by_s), -1), np.append(_inverse(by_t), -1)
    count = max(int(levels_s.max(initial=-1)), int(levels_t.max(initial=-1))) + 1
    need_order = np.argsort(at_t[moved.need], kind="stable")
    need_counts = np.bincount(at_t[moved.need], minlength=len(by_t))
    numbers = np.arange(count + 1)
    return Levels(
        by_s, by_t, np.searchsorted(levels_s[by_s], numbers), np.searchsorted(levels_t[by_t], numbers),
        at_s[segment], first[by_s], last[by_s], at_s[previous[by_s]], at_t[waits_for[by_s]], at_t[moved.before[by_t]],
        moved.event[need_order], np.append(0, np.cumsum(need_counts)),
    )  # fmt: skip


def _inverse(order: Ints) -> Ints:
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found


def _levels(previous: Ints, waits_for: Ints, before: Ints, need: Ints, need_segment: Ints) -> tuple[Ints, Ints]:
    """Return the level of each segment and transfer; -1 where it cannot be computed."""
    missing_s = (previous >= 0).astype(np.int64) + (waits_for >= 0)
    missing_t = np.bincount(need, minlength=len(before)) + (before >= 0)
    level_s, level_t = np.full(len(previous), -1, np.int64), np.full(len(before), -1, np.int64)
    next_s, next_t = _followers(previous), _followers(before)
    needers, waiters = _grouped(need_segment, need, len(previous)), _grouped_known(waits_for, len(before))
    ready_s, ready_t = np.flatnonzero(missing_s == 0), np.flatnonzero(missing_t == 0)
    level = 0
    while len(ready_s) or len(ready_t):
        level_s[ready_s], level_t[ready_t] = level, level
        touched_t = np.concatenate([_of(needers, ready_s), next_t[ready_t]])
        touched_s = np.concatenate([_of(waiters, ready_t), next_s[ready_s]])
        ready_s, ready_t = _less(missing_s, touched_s), _less(missing_t, touched_t)
        level += 1
    return level_s, level_t


def _followers(previous: Ints) -> Ints:
    found = np.full(len(previous), -1, np.int64)
    known = np.flatnonzero(previous >= 0)
    found[previous[known]] = known
    return found


def _grouped(keys: Ints, values: Ints, count: int) -> tuple[Ints, Ints]:
    """Return values by key, and the first place of each key."""
    return values[np.argsort(keys, kind="stable")], np.append(0, np.cumsum(np.bincount(keys, minlength=count)))


def _grouped_known(keys: Ints, count: int) -> tuple[Ints, Ints]:
    known = np.flatnonzero(keys >= 0)
    return _grouped(keys[known], known, count)


def _of(grouped: tuple[Ints, Ints], keys: Ints) -> Ints:
    """Return the values of several keys."""
    values, starts = grouped
    begin, counts = starts[keys], starts[keys + 1] - starts[keys]
    total = int(counts.sum())
    ends = np.cumsum(counts)
    return values[np.repeat(begin - (ends - counts), counts) + np.arange(total)]


def _less(missing: Ints, touched: Ints) -> Ints:
    """Count one dependency less for every touched node; return those that have none left."""
    touched = touched[touched >= 0]
    np.subtract.at(missing, touched, 1)
    return np.unique(touched[missing[touched] == 0])


def simulate(graph: Graph, schedule: Levels, own_ns: Floats, took_ns: Floats) -> Floats:
    """Return when each host ends each step, for several sets of durations.

    Args:
        graph, schedule: nodes and their order.
        own_ns: float64 ``[events, sets]``, own times, as in ``Events.own_ns``.
        took_ns: float64 ``[transfers, sets]``, durations of the transfers, in the order of the graph.

    Returns:
        float64 ``[ranks, steps, sets]``, nanoseconds after the earliest begin of a host.
    """
    sets = own_ns.shape[1]
    first, window = schedule.first_event, graph.window
    sums = np.cumsum(own_ns, axis=0)
    chains = schedule.previous < 0
    rank_of = graph.events.rank[first]
    base = sums[first]
    base[chains] -= own_ns[first[chains]]  # the first own time of a host is part of its first segment
    offset = sums - base[schedule.segment_of_event]
    length = offset[schedule.last_event]
    delay = own_ns[first]
    begin = (window.begin_ns - window.begin_ns.min()).astype(np.float64)
    took = took_ns[schedule.transfers]
    needed_offset, needed = offset[schedule.event], schedule.segment_of_event[schedule.event]
    at = np.full((len(first) + 1, sets), -np.inf)  # the last row is for "none"
    over = np.full((len(took) + 1, sets), -np.inf)
    roots = schedule.previous < 0
    at[:-1][roots] = begin[rank_of[roots], None]
    starts = schedule.need_starts
    for (lo, hi), (low, high) in zip(pairwise(schedule.segment_levels), pairwise(schedule.transfer_levels), strict=True):
        if high > low:
            a, b = starts[low], starts[high]
            ready = np.maximum.reduceat(at[needed[a:b]] + needed_offset[a:b], starts[low:high] - a, axis=0)
            over[low:high] = np.maximum(ready, over[schedule.before[low:high]]) + took[low:high]
        if hi > lo:
            previous = schedule.previous[lo:hi]
            goes_on = np.maximum(at[previous] + length[previous], over[schedule.waits_for[lo:hi]]) + delay[lo:hi]
            at[lo:hi] = np.where((previous < 0)[:, None], at[lo:hi], goes_on)
    marks = np.flatnonzero(graph.events.kind == STEP_ENDS)
    found = at[schedule.segment_of_event[marks]] + offset[marks]
    return found.reshape(len(window.begin_ns), len(window.steps), sets)


def step_times(ends: Floats, begin_ns: Ints) -> Floats:
    """Return float64 ``[steps, sets]``: duration of each step, the mean of all ranks, in nanoseconds.

    Args:
        ends: result of ``simulate``.
        begin_ns: int64 ``[ranks]``, begin of the window.
    """
    begin = (begin_ns - begin_ns.min()).astype(np.float64)[:, None, None]
    steps: Floats = np.diff(ends, axis=1, prepend=np.broadcast_to(begin, (*begin.shape[:2], ends.shape[2]))).mean(axis=0)
    return steps


def columns(sets: Sequence[npt.NDArray[np.float64]]) -> Floats:
    """Return float64 ``[n, sets]`` from one array for each set."""
    return np.ascontiguousarray(np.stack(sets, axis=1))
