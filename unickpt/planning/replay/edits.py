"""Durations of a graph with a change. Every function returns new arrays and leaves its arguments as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unickpt.base.arrays import Floats, Ints, row_numbers
from unickpt.diagnosis.detectors.medians import grouped_quantiles
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.alike import OwnTimes, like_all, like_others, stages_of
from unickpt.planning.replay.graph import CALLED, RETURNS, Graph


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations in nanoseconds.

    Attributes:
        own_ns: float64 ``[events]``, as ``Events.own_ns``.
        took_ns: float64 ``[transfers]``.
    """

    own_ns: Floats
    took_ns: Floats


def measured(graph: Graph) -> Durations:
    """Return the durations as they were measured."""
    return Durations(graph.events.own_ns.astype(np.float64), graph.transfers.took_ns.astype(np.float64))


def with_own_times(now: Durations, pieces: OwnTimes, wanted_ns: Floats) -> Durations:
    """Set the own times of pieces; NaN keeps a piece. The events of a piece are scaled together."""
    changed = np.isfinite(wanted_ns)
    empty = changed & (pieces.own_ns <= 0)
    factor = np.where(changed & ~empty, wanted_ns / np.where(pieces.own_ns > 0, pieces.own_ns, 1.0), 1.0)
    own = now.own_ns * factor[pieces.of_event]
    own[pieces.last_event[empty]] = wanted_ns[empty]
    return replace(now, own_ns=own)


def with_ranks(now: Durations, pieces: OwnTimes, wanted_ns: Floats, ranks: Ints) -> Durations:
    """Set the own times of some ranks only."""
    return with_own_times(now, pieces, np.where(np.isin(pieces.rank, ranks), wanted_ns, np.nan))


def without_delays(now: Durations, graph: Graph) -> Durations:
    """Every host goes on as soon as the transfer that it waits for is over."""
    return replace(now, own_ns=np.where(graph.events.kind == RETURNS, 0.0, now.own_ns))


def without_pauses(now: Durations, pieces: OwnTimes, kinds: Sequence[str]) -> Durations:
    """No rank has pauses of these kinds (``alike.PAUSES``)."""
    paused = np.sum([pieces.pauses_ns[kind] for kind in kinds], axis=0)
    return with_own_times(now, pieces, np.maximum(pieces.own_ns - paused, 0.0))


def without_time(now: Durations, transfers: Ints) -> Durations:
    """Some transfers take no time: the bound for hiding them behind computation."""
    took = now.took_ns.copy()
    took[transfers] = 0.0
    return replace(now, took_ns=took)


def with_speed(now: Durations, graph: Graph, transfers: Ints, factor: float) -> Durations:
    """Some transfers have a link of another speed.

    A transfer takes a constant time and a time for each byte (alpha and beta). Only the second part changes. The constant comes
    from a line through the median durations of the sizes that the same operation has in communicators of this kind. It is 0 if
    there is only one size, so the change is then the largest possible one.

    Members go on one after the other. The time that one of them goes on later than the first changes in the same way, up to
    the duration of the transfer: a longer one is a delay of the host.

    Args:
        now: durations.
        graph: nodes.
        transfers: the transfers of this link.
        factor: new speed as a multiple of the measured one.
    """
    constant = np.minimum(constant_times(graph, now.took_ns), now.took_ns)[transfers]
    changes = np.zeros(len(now.took_ns))  # the part of each duration that changes
    changes[transfers] = now.took_ns[transfers] - constant
    own, events = now.own_ns.copy(), graph.events
    waited = np.flatnonzero(events.kind == RETURNS)
    own[waited] -= np.minimum(own[waited], changes[events.transfer[waited]]) * (1 - 1 / factor)
    return Durations(own, now.took_ns - changes * (1 - 1 / factor))


def constant_times(graph: Graph, took_ns: Floats) -> Floats:
    """Return float64 ``[transfers]``: part of each duration that does not depend on the size; 0 if only one size is known."""
    size = graph.window.trace.calls["bytes"][graph.transfers.call].astype(np.float64)
    kind, line = class_of_transfers(graph), class_of_transfers(graph, sizes=False)
    median = _medians(kind, took_ns)
    found = np.zeros(len(took_ns))
    first = np.unique(kind, return_index=True)[1]  # one transfer of each class
    for each in np.unique(line).tolist():
        points = first[line[first] == each]
        if len(points) < 2 or np.ptp(size[points]) == 0:
            continue
        slope, constant = np.polyfit(size[points], median[points], 1)
        if slope > 0:  # otherwise the size does not explain the durations
            found[line == each] = max(float(constant), 0.0)
    return found


def others_own_times(graph: Graph, pieces: OwnTimes) -> Floats:
    """Return float64 ``[pieces]``: the own time that a rank would have if it were like its peers.

    A rank whose role no other rank has is compared by its total: its pieces are scaled to the median total of the other ranks.
    NaN if there is no other rank.
    """
    found = like_others(pieces, pieces.own_ns)
    alone = np.isnan(found)
    if not alone.any():
        return found
    ranks, steps = len(graph.window.begin_ns), len(graph.window.steps)
    totals = np.bincount(pieces.rank * steps + pieces.step, pieces.own_ns, minlength=ranks * steps).reshape(ranks, steps)
    for rank in np.unique(pieces.rank[alone]).tolist():
        rest = np.delete(totals, rank, axis=0)
        if not len(rest):
            continue
        factor = np.median(rest, axis=0) / np.maximum(totals[rank], 1.0)
        here = alone & (pieces.rank == rank)
        found[here] = pieces.own_ns[here] * factor[pieces.step[here]]
    return found


def has_peers(pieces: OwnTimes, ranks: int) -> list[bool]:
    """Return for each rank whether another one has its role in every step."""
    alone = np.isnan(like_others(pieces, pieces.own_ns))
    lonely = np.zeros(ranks, bool)
    lonely[pieces.rank[alone]] = True
    return [not each for each in lonely.tolist()]


def balanced_stage(graph: Graph, pieces: OwnTimes, work_ns: Floats, stage: int) -> Floats:
    """Return float64 ``[pieces]``: ``work_ns`` with one pipeline stage scaled to the mean of the other stages."""
    stages = stages_of(graph.window.trace)
    of = stages[pieces.rank]
    means = {each: float(work_ns[of == each].sum()) / int((stages == each).sum()) for each in np.unique(stages).tolist()}
    own = means.pop(stage)
    factor = sum(means.values()) / len(means) / max(own, 1.0) if means else 1.0
    return np.where(of == stage, work_ns * factor, work_ns)


def ideal(now: Durations, graph: Graph, pieces: OwnTimes) -> Durations:
    """No pauses, every rank like the lower median of its role, every transfer like the median of its class."""
    return replace(with_own_times(now, pieces, like_all(pieces, pieces.work_ns)), took_ns=like_class(graph, now.took_ns))


def class_of_transfers(graph: Graph, *, sizes: bool = True) -> Ints:
    """Return int64 ``[transfers]``: transfers of one operation, kind of group, number of members and size are of one class.

    Without ``sizes``, the size does not count.
    """
    trace, call = graph.window.trace, graph.window.trace.calls[graph.transfers.call]
    labels: dict[tuple[str, int], int] = {}
    kind = np.array([labels.setdefault((g.label, len(g.members)), len(labels)) for g in trace.groups] or [0], np.int64)
    operation = operations_of_transfers(graph)
    size = np.where((call["op"] == Op.ALL_TO_ALL) | (not sizes), 0, call["bytes"])
    return row_numbers(operation, kind[call["comm"]], size)


def operations_of_transfers(graph: Graph) -> Ints:
    """Return int64 ``[transfers]``: operations. A message is ``RECEIVE``; ``SEND`` is a sender that did not wait for it."""
    row = graph.transfers.call
    operation = graph.window.trace.calls["op"][row].astype(np.int64)
    return np.where((operation == Op.SEND) & ~graph.transfers.alone[row], int(Op.RECEIVE), operation)


def parties_of_transfers(graph: Graph) -> Ints:
    """Return int64 ``[transfers]``: communicator, or pair of ranks in any direction, that carries each transfer."""
    call = graph.window.trace.calls[graph.transfers.call]
    pair = np.sort(np.stack([call["source"], call["destination"]], axis=1), axis=1)
    return row_numbers(*pair.T, np.where(pair[:, 0] < 0, call["comm"], -1))


def like_class(graph: Graph, took_ns: Floats) -> Floats:
    """Return float64 ``[transfers]``: median duration of the class of each transfer."""
    return _medians(class_of_transfers(graph), took_ns)


def typical(now: Durations, graph: Graph, pieces: OwnTimes) -> Durations:
    """Every step has the same durations: medians over the steps of the window in which a rank makes as many calls."""
    steps = len(graph.window.steps)
    row = pieces.rank * steps + pieces.step
    key = row_numbers(pieces.rank, np.bincount(row)[row], pieces.place)
    made = np.flatnonzero(graph.events.kind == CALLED)
    event = np.empty(len(graph.window.trace.calls), np.int64)
    event[graph.events.call[made]] = made
    of_transfer = key[pieces.of_event[event[graph.transfers.call]]]  # by the place of one of its calls
    own = with_own_times(now, pieces, _medians(key, pieces.own_ns))
    return replace(own, took_ns=_medians(of_transfer, now.took_ns))


def _medians(keys: Ints, values: Floats) -> Floats:
    """Return float64 ``[n]``: median of the values with the same key, for each of the keys ``[n]``."""
    known, (of_key,), _ = grouped_quantiles(keys, values)
    found: Floats = of_key[np.searchsorted(known, keys)]
    return found


def transfers_of_link(graph: Graph, pair: tuple[int, int]) -> Ints:
    """Return the transfers between two global ranks, in both directions."""
    call = graph.window.trace.calls[graph.transfers.call]
    ends = np.sort(np.stack([call["source"], call["destination"]], axis=1), axis=1)
    return np.flatnonzero((ends == np.sort(pair)).all(axis=1))


def with_links_like_others(now: Durations, graph: Graph, pairs: Sequence[tuple[int, int]]) -> Durations | None:
    """The transfers of pairs of global ranks are like others of their class; None without transfers, or without others."""
    here = np.concatenate([transfers_of_link(graph, pair) for pair in pairs])
    parties, kinds = parties_of_transfers(graph), class_of_transfers(graph)
    took = like_other_parties(now.took_ns, np.unique(parties[here]), parties, kinds) if len(here) else None
    return None if took is None else replace(now, took_ns=took)


def like_other_parties(took_ns: Floats, chosen: Ints, parties: Ints, kinds: Ints) -> Floats | None:
    """Return the durations with some communicators or pairs like the others of their class; None if there are no others."""
    here = np.isin(parties, chosen)
    out, changed = took_ns.copy(), False
    for kind in np.unique(kinds[here]).tolist():
        rest = took_ns[(kinds == kind) & ~here]
        if len(rest):
            out[here & (kinds == kind)] = np.median(rest)
            changed = True
    return out if changed else None
