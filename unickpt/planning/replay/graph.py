"""Graph of a window: a chain of events for each host, and transfers that connect them.

Events of a host are calls, begins of waits, returns from waits, and ends of steps. The time between two events in which the
host does not wait is its own time. A transfer starts when the members that it needs have called and the transfer before it in
its communicator is over. It lasts until the first member that waits for it goes on.

The kinds of calls need different members:

- collectives without a root: all members
- broadcast, scatter, reduce, gather: the root and the member itself; the root needs the members that called before it went on
- a pair: both sides. A sender that goes on before the receiver has its message has a transfer of its own, which needs the
  receiver only if it had called by then
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.trace import Window

CALLED, WAITS, RETURNS, STEP_ENDS = range(4)  # kinds of events
ROOTED = (int(Op.BROADCAST), int(Op.REDUCE), int(Op.GATHER), int(Op.SCATTER))
PAIRS = (int(Op.SEND), int(Op.RECEIVE))
_NEVER = np.int64(1) << 62


@dataclass(frozen=True, slots=True)
class Events:
    """Events of all hosts, by rank and time: int64 arrays ``[events]``.

    Attributes:
        rank: position of the rank.
        kind: ``CALLED`` to ``STEP_ENDS``.
        call: row of the call in the trace; number of the step for its end.
        at_ns: measured time.
        transfer: for a return, the transfer that it waits for; otherwise -1.
        own_ns: own time since the event before. For a return: delay of the host after the end of the transfer.
    """

    rank: Ints
    kind: Ints
    call: Ints
    at_ns: Ints
    transfer: Ints
    own_ns: Ints


@dataclass(frozen=True, slots=True)
class Transfers:
    """Transfers: int64 arrays ``[transfers]``, two arrays ``[needs]``, and two ``[calls]``.

    Attributes:
        call: row of one of its calls, for operation, communicator and size.
        before: transfer before it in the same communicator or pair; -1 for none.
        took_ns: duration.
        need: transfer that needs an event, ascending.
        event: event that it needs, a call.
        of_call: int64 ``[calls]``, transfer of each call.
        alone: bool ``[calls]``, whether the call's transfer has no other calls because it did not wait for their end.
    """

    call: Ints
    before: Ints
    took_ns: Ints
    need: Ints
    event: Ints
    of_call: Ints
    alone: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Graph:
    """Graph of a window.

    Attributes:
        window: calls and steps.
        events, transfers: nodes.
    """

    window: Window
    events: Events
    transfers: Transfers


def graph_of(window: Window) -> Graph:
    """Return the graph with measured durations."""
    rank, kind, call, at = _events(window)
    event_of_call = np.full(len(window.trace.calls), -1, np.int64)
    called = np.flatnonzero(kind == CALLED)
    event_of_call[call[called]] = called
    node_of_call, alone, transfer_call, need, needed = _transfers(window)
    before, took, end = _durations(window, node_of_call, alone[transfer_call], transfer_call, need, needed)
    returns = kind == RETURNS
    transfer = np.full(len(kind), -1, np.int64)
    transfer[returns] = node_of_call[call[returns]]
    previous = np.append(0, at[:-1])
    first = np.append(True, rank[1:] != rank[:-1]) if len(rank) else np.zeros(0, bool)
    previous[first] = window.begin_ns[rank[first]]
    previous[returns] = np.maximum(previous[returns], end[transfer[returns]])
    own = np.maximum(at - previous, 0)
    return Graph(
        window,
        Events(rank, kind, call, at, transfer, own),
        Transfers(transfer_call, before, took, need, event_of_call[needed], node_of_call, alone),
    )


def _events(window: Window) -> tuple[Ints, Ints, Ints, Ints]:
    """Return rank, kind, call and time of every event, in the order of the hosts' programs."""
    calls, last = window.trace.calls, window.ends_ns[:, -1]
    row = np.arange(len(calls), dtype=np.int64)
    whole = (calls["end_ns"] > 0) & (calls["wait_ns"] > 0) & (calls["end_ns"] <= last[calls["rank"]])
    later = whole & (calls["wait_ns"] > calls["call_ns"])  # a call that waits at once needs no event for its wait
    count, steps = window.ends_ns.shape
    marks = window.ends_ns.reshape(-1)
    mark_rank, number = np.repeat(np.arange(count), steps), np.tile(np.arange(steps), count)
    rank = np.concatenate([calls["rank"], calls["rank"][later], calls["rank"][whole], mark_rank]).astype(np.int64)
    kind = np.repeat([CALLED, WAITS, RETURNS, STEP_ENDS], [len(calls), later.sum(), whole.sum(), len(marks)])
    call = np.concatenate([row, row[later], row[whole], number])
    at = np.concatenate([calls["call_ns"], calls["wait_ns"][later], calls["end_ns"][whole], marks])
    # Events at one time: a call returns before the next call is made, a step ends before the next one's calls.
    by_time = np.lexsort((calls["call_ns"], calls["rank"]))
    place = np.empty(len(calls), np.int64)
    place[by_time] = row
    bound = _first_not_before(calls["rank"][by_time], calls["call_ns"][by_time], mark_rank, marks)
    tie = np.concatenate([2 * place[row], 2 * place[later], 2 * place[whole], 2 * bound - 1])
    order = np.lexsort((kind, tie, at, rank))
    return rank[order], kind[order].astype(np.int64), call[order], at[order]


def _first_not_before(ranks: npt.NDArray[np.int32], moments: Ints, rank: Ints, moment: Ints) -> Ints:
    """Return for each ``(rank, moment)`` the number of sorted pairs ``(ranks, moments)`` before it."""
    both = np.lexsort((np.repeat([1, 0], [len(ranks), len(rank)]), np.append(moments, moment), np.append(ranks, rank)))
    seen = np.cumsum(both < len(ranks))
    found = np.empty(len(rank), np.int64)
    asked = both >= len(ranks)
    found[both[asked] - len(ranks)] = seen[asked]
    return found


def _transfers(window: Window) -> tuple[Ints, npt.NDArray[np.bool_], Ints, Ints, Ints]:
    """Return the transfer of each call, whether it has no other calls, one call of each, and the calls that each needs."""
    calls = window.trace.calls
    order = np.lexsort((calls["rank"], calls["seq"], calls["destination"], calls["source"], calls["comm"]))
    names = [calls[name][order] for name in ("comm", "source", "destination", "seq")]
    new = np.ones(len(order), bool)
    new[1:] = np.any([name[1:] != name[:-1] for name in names], axis=0)
    key = np.empty(len(order), np.int64)
    key[order] = np.cumsum(new) - 1
    keys = int(new.sum())
    at, end = calls["call_ns"], np.where(calls["end_ns"] > 0, calls["end_ns"], _NEVER)
    rooted = np.isin(calls["op"], ROOTED) & (calls["root"] >= 0)  # otherwise as if it needed all members
    is_root = rooted & (window.trace.ranks[calls["rank"]] == calls["root"])
    root = np.full(keys, -1, np.int64)
    root[key[is_root]] = np.flatnonzero(is_root)
    receiver, received_ns = np.full(keys, -1, np.int64), np.full(keys, -_NEVER)
    receives = np.flatnonzero(calls["op"] == Op.RECEIVE)
    receiver[key[receives]] = receives
    received_ns[key[receives]] = np.where(calls["end_ns"] > 0, end, at)[receives]
    alone = (calls["op"] == Op.SEND) & (end < received_ns[key])  # went on before the receiver had it
    alone |= rooted & ~is_root
    number = np.append(key[~alone], keys + np.arange(int(alone.sum())))
    row = np.append(np.flatnonzero(~alone), np.flatnonzero(alone))
    _, transfer = np.unique(number, return_inverse=True)
    node_of_call = np.empty(len(calls), np.int64)
    node_of_call[row] = transfer
    transfer_call = np.zeros(int(transfer.max(initial=-1)) + 1, np.int64)
    transfer_call[transfer] = row
    node_of_key = np.full(keys, -1, np.int64)
    node_of_key[key[~alone]] = node_of_call[~alone]
    needs = [(node_of_call, np.arange(len(calls)))]  # each call needs itself
    eager = (calls["op"] == Op.SEND) & alone  # its receiver needs it too
    needs.append((node_of_key[key[eager]], np.flatnonzero(eager)))
    waited = np.flatnonzero(eager)
    waited = waited[end[waited] >= at[receiver[key[waited]]]]  # it may have needed the receiver's call
    needs.append((node_of_call[waited], receiver[key[waited]]))
    leaves = np.flatnonzero(rooted & ~is_root)
    of = root[key[leaves]]
    known = of >= 0
    before = known & (at[np.maximum(of, 0)] <= end[leaves])
    needs.append((node_of_call[leaves[before]], of[before]))
    late = known & (at[leaves] <= end[np.maximum(of, 0)])
    needs.append((node_of_key[key[leaves[late]]], leaves[late]))
    need, needed = (np.concatenate([each[side] for each in needs]).astype(np.int64) for side in (0, 1))
    by_node = np.argsort(need, kind="stable")
    return node_of_call, alone, transfer_call, need[by_node], needed[by_node]


def _durations(
    window: Window, node_of_call: Ints, alone: npt.NDArray[np.bool_], call: Ints, need: Ints, needed: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return for each transfer the one before it, its duration, and its measured end."""
    calls = window.trace.calls
    ready, end = np.full(len(call), -_NEVER), np.full(len(call), _NEVER)
    np.maximum.at(ready, need, calls["call_ns"][needed])
    ended = calls["end_ns"] > 0
    np.minimum.at(end, node_of_call[ended], calls["end_ns"][ended])
    end = np.where(end < _NEVER, np.maximum(end, ready), ready)
    ops = calls["op"][call]
    queued = np.flatnonzero(~np.isin(ops, ROOTED))
    of = calls[call[queued]]
    order = np.lexsort((of["seq"], alone[queued], of["destination"], of["source"], of["comm"]))
    queued, of = queued[order], of[order]
    same = np.all([of[name][1:] == of[name][:-1] for name in ("comm", "source", "destination")], axis=0)
    same &= alone[queued[1:]] == alone[queued[:-1]]
    in_order = end[queued[:-1]] <= end[queued[1:]]  # otherwise they ran beside each other
    before = np.full(len(call), -1, np.int64)
    linked = same & in_order
    before[queued[1:][linked]] = queued[:-1][linked]
    begin = np.where(before >= 0, np.maximum(ready, end[before]), ready)
    return before, np.maximum(end - begin, 0), end
