"""Graph of a pipeline with another number of microbatches.

The steady part of a pipeline's schedule repeats: each rank makes the same calls for one microbatch after the other. This
*unit* of events is found in the records of each rank and step, and is copied or taken out. Everything before and after it, the
filling and the draining of the pipeline and the end of the step, stays as it is. That is the schedule with one forward and one
backward computation in turn (1F1B), whatever else the units contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Ints, row_numbers
from unickpt.base.errors import FormatError
from unickpt.planning.replay.graph import CALLED, PAIRS, RETURNS, STEP_ENDS, Events, Graph, Transfers


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one rank in one step: the first event, the number of events of one, their number, and microbatches."""

    first: int
    length: int
    count: int
    microbatches: int


def with_microbatches(graph: Graph, wanted: int) -> Graph:
    """Return a graph whose steps have another number of microbatches, each like one of those measured.

    The times of its events are not those of the new schedule; ``simulate`` computes them from the durations of the graph.

    Raises:
        FormatError: the calls of some rank do not repeat in each step, or ``wanted`` microbatches do not fill the pipeline.
    """
    stages = _stages(graph)
    if wanted < stages:
        raise FormatError(f"{wanted} microbatches do not fill the pipeline: it has {stages} stages")
    events = graph.events
    label = _labels(graph)
    ends = np.flatnonzero(events.kind == STEP_ENDS)
    begins = np.append(0, ends[:-1] + 1)
    picked: list[Ints] = []
    found: set[int] = set()
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        rank = int(graph.window.trace.ranks[events.rank[end]])
        units = _units(graph, label, begin, end, rank)
        found.add(units.microbatches)
        kept = units.count + wanted - units.microbatches
        if kept < 1:
            raise FormatError(
                f"{wanted} microbatches do not fill the pipeline: rank {rank} needs at least {wanted - kept + 1} for this "
                "schedule"
            )
        # The first unit has the own time between the begin of the step and its first call: only the others are repeated.
        chosen = np.append(0, 1 + np.arange(kept - 1) % (units.count - 1))
        body = units.first + (chosen[:, None] * units.length + np.arange(units.length)).reshape(-1)
        rest = np.arange(units.first + units.count * units.length, end + 1)
        picked += [np.arange(begin, units.first), body, rest]
    if len(found) != 1:
        raise FormatError(f"the steps have different numbers of microbatches: {', '.join(map(str, sorted(found)))}")
    return _of_events(graph, np.concatenate(picked))


def _stages(graph: Graph) -> int:
    """Return the number of stages: the ranks of the longest chain that messages of pairs connect."""
    calls = graph.window.trace.calls
    pairs = calls[np.isin(calls["op"], PAIRS)]
    ends = np.unique(np.stack([pairs["source"], pairs["destination"]], axis=1), axis=0)
    ranks, at = np.unique(ends, return_inverse=True)
    of = np.arange(len(ranks))
    source, target = at.reshape(ends.shape).T
    while len(ranks):
        least = of.copy()
        np.minimum.at(least, source, of[target])
        np.minimum.at(least, target, of[source])
        if (least == of).all():
            break
        of = least
    return int(np.bincount(of).max(initial=0)) if len(ranks) else 0


def microbatches_of(graph: Graph) -> int:
    """Return the number of microbatches of the first step.

    Raises:
        FormatError: as in ``with_microbatches``.
    """
    end = int(np.flatnonzero(graph.events.kind == STEP_ENDS)[0])
    return _units(graph, _labels(graph), 0, end, int(graph.window.trace.ranks[graph.events.rank[end]])).microbatches


def units_of(graph: Graph) -> Iterator[tuple[int, Units]]:
    """Yield the position of the rank and the units of each rank and step.

    Raises:
        FormatError: as in ``with_microbatches``.
    """
    label = _labels(graph)
    ends = np.flatnonzero(graph.events.kind == STEP_ENDS)
    for begin, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True):
        at = int(graph.events.rank[end])
        yield at, _units(graph, label, begin, end, int(graph.window.trace.ranks[at]))


def _calls_back(events: Events) -> Ints:
    """Return for each event of a call how many calls later than the call it is; 0 for the call itself."""
    made = events.kind == CALLED
    number = np.cumsum(made)
    of_call = np.zeros(int(made.sum()), np.int64)
    of_call[events.call[made]] = number[made]
    back = np.zeros(len(made), np.int64)
    inside = events.kind != STEP_ENDS
    back[inside] = number[inside] - of_call[events.call[inside]]
    return back


def _labels(graph: Graph) -> Ints:
    """Return int64 ``[events]``: the same number for events that can stand for each other in another microbatch."""
    events, calls = graph.events, graph.window.trace.calls
    inside = events.kind != STEP_ENDS
    names = np.full((len(inside), 7), -1, np.int64)
    names[:, 0], names[:, 1] = events.kind, _calls_back(events)
    for at, name in enumerate(("comm", "source", "destination", "op", "bytes"), start=2):
        names[inside, at] = calls[name][events.call[inside]]
    return row_numbers(*names.T)


def _units(graph: Graph, label: Ints, begin: int, end: int, rank: int) -> Units:
    """Find the units among the events ``begin`` to ``end`` of a rank's step: the longest part that repeats them."""
    events, calls = graph.events, graph.window.trace.calls
    own = label[begin:end]
    at = np.flatnonzero(events.kind[begin:end] == CALLED)
    call = calls[events.call[begin:end][at]]
    at, call = at[np.isin(call["op"], PAIRS)], call[np.isin(call["op"], PAIRS)]
    if not len(at):
        raise FormatError(f"rank {rank} makes no point-to-point transfers: the job has no pipeline")
    pair = row_numbers(call["source"], call["destination"])
    totals = np.bincount(pair)
    best: Units | None = None
    for length in np.unique(np.concatenate([np.diff(at[own[at] == each]) for each in np.unique(own[at])])).tolist():
        first, run = _longest(own[length:] == own[:-length])
        if run < length:
            continue  # less than two units
        of_unit = np.bincount(pair[(at >= first) & (at < first + length)], minlength=len(totals))
        if (of_unit == 0).any() or (totals % of_unit).any() or len(set((totals // of_unit).tolist())) > 1:
            continue
        units = Units(begin + first, length, run // length + 1, int(totals[0] // of_unit[0]))
        if best is None or units.count * units.length > best.count * best.length:
            best = units
    if best is None:
        raise FormatError(
            f"the calls of rank {rank} do not repeat from microbatch to microbatch. The schedule must be 1F1B without "
            "interleaving, and the records need more microbatches than stages"
        )
    return best


def _longest(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first position and the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(np.argmax(lengths))
    return int(edges[2 * at]), int(lengths[at])


def _of_events(graph: Graph, picked: Ints) -> Graph:
    """Return the graph of some events, each as often as it is in ``picked``, in this order; events of a rank are together.

    Calls are matched again by their order in the communicator, or in the pair and direction. A transfer takes the mean of the
    transfers that its calls were part of, and needs the same members.
    """
    events, old = graph.events, graph.transfers
    calls = graph.window.trace.calls
    kind, rank = events.kind[picked], events.rank[picked]
    made = kind == CALLED
    source = events.call[picked[made]]  # row of the call that each new call repeats
    new = calls[source].copy()
    both = np.concatenate([new, calls])
    queues = row_numbers(both["comm"], both["source"], both["destination"])
    by_rank = row_numbers(both["rank"], queues)
    queue, order = queues[: len(new)], np.argsort(by_rank[: len(new)], kind="stable")
    firsts = np.flatnonzero(np.append(True, np.diff(by_rank[order]) != 0))
    lengths = np.diff(np.append(firsts, len(order)))
    new["seq"][order] = np.repeat(new["seq"][order[firsts]] - firsts, lengths) + np.arange(len(order))
    _check_members(np.append(new["seq"], calls["seq"]), queues, by_rank, len(new))
    number = np.cumsum(made)
    call = np.where(kind == STEP_ENDS, events.call[picked], number - 1 - _calls_back(events)[picked])

    key = row_numbers(queue, new["seq"])
    alone = old.alone[source]
    keys = int(key.max(initial=-1)) + 1
    named = np.where(alone, keys + np.arange(len(key)), key)
    node = np.unique(named, return_inverse=True)[1].reshape(-1)
    nodes = int(node.max(initial=-1)) + 1
    took = np.bincount(node, old.took_ns[old.of_call[source]], nodes) / np.maximum(np.bincount(node, minlength=nodes), 1)
    of_node = np.zeros(nodes, np.int64)
    of_node[node] = np.arange(len(node))

    need, needed = _needs(graph, new, source, key, node)
    before = _before(graph, new, source, of_node, row_numbers(queue, alone))
    row = np.flatnonzero(made)
    transfer = np.where(kind == RETURNS, node[np.where(kind == RETURNS, call, 0)] if nodes else -1, -1)
    window = replace(graph.window, trace=replace(graph.window.trace, calls=new))
    return Graph(
        window,
        Events(rank, kind, call, events.at_ns[picked], transfer, events.own_ns[picked]),
        Transfers(of_node, before, np.rint(took).astype(np.int64), need, row[needed], node, alone),
    )


def _check_members(seq: Ints, queue: Ints, by_rank: Ints, new: int) -> None:
    """Refuse a change after which one member of a communicator has made more new calls than another.

    Args:
        seq, queue, by_rank: int64 ``[calls]``, number of each call, its communicator or pair, and the same for each rank.
        new: how many of these calls are of the changed graph; the others are of the measured one.
    """
    last = np.full((2, int(by_rank.max(initial=-1)) + 1), -1)
    np.maximum.at(last[0], by_rank[:new], seq[:new])
    np.maximum.at(last[1], by_rank[new:], seq[new:])
    more = (last[0] - last[1])[by_rank]
    most = np.full(int(queue.max(initial=-1)) + 1, -(np.int64(1) << 62))
    np.maximum.at(most, queue, more)
    if (more < most[queue]).any():
        raise FormatError("members of a communicator make different numbers of its calls for one microbatch")


def _needs(graph: Graph, new: npt.NDArray[np.void], source: Ints, key: Ints, node: Ints) -> tuple[Ints, Ints]:
    """Return the transfers that need a call, ascending, and the new calls that they need."""
    old, calls = graph.transfers, graph.window.trace.calls
    starts = np.searchsorted(old.need, np.arange(len(old.call) + 1))
    template = old.of_call[source]
    begin, counts = starts[template], starts[template + 1] - starts[template]
    each = np.repeat(np.arange(len(source)), counts)
    at = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begin, counts)
    rank = calls["rank"][graph.events.call[old.event[at]]].astype(np.int64)
    ranks = len(graph.window.trace.ranks)
    mine = key * ranks + new["rank"]
    order = np.argsort(mine, kind="stable")
    wanted = key[each] * ranks + rank
    place = np.minimum(np.searchsorted(mine[order], wanted), len(order) - 1)
    known = mine[order[place]] == wanted
    pairs = np.unique(np.stack([node[each[known]], order[place[known]]], axis=1), axis=0)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _before(graph: Graph, new: npt.NDArray[np.void], source: Ints, of_node: Ints, queue: Ints) -> Ints:
    """Return the transfer before each one in its queue; -1 for none, and where the one that it repeats ran beside it."""
    old, calls = graph.transfers, graph.window.trace.calls
    first_calls = calls[old.call]
    of = row_numbers(first_calls["comm"], first_calls["source"], first_calls["destination"], old.alone[old.call])
    least = np.full(int(of.max(initial=-1)) + 1, np.int64(1) << 62)
    np.minimum.at(least, of, first_calls["seq"])
    beside = (old.before < 0) & (first_calls["seq"] > least[of])  # also for calls with a root, which have no queue
    rooted = new["root"][of_node] >= 0
    free = beside[old.of_call[source[of_node]]] | rooted
    queued = np.flatnonzero(~rooted)
    order = queued[np.lexsort((new["seq"][of_node[queued]], queue[of_node[queued]]))]
    same = queue[of_node[order[1:]]] == queue[of_node[order[:-1]]]
    before = np.full(len(of_node), -1, np.int64)
    linked = same & ~free[order[1:]]
    before[order[1:][linked]] = order[:-1][linked]
    return before
