"""Durations with another order of ranks: each rank runs at the place where another one ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unickpt.base.arrays import Floats, Ints, row_numbers
from unickpt.base.errors import FormatError
from unickpt.planning.replay.alike import OwnTimes, like_all
from unickpt.planning.replay.edits import Durations, operations_of_transfers, parties_of_transfers, with_own_times
from unickpt.planning.replay.graph import Graph
from unickpt.planning.replay.trace import Trace


def with_order(now: Durations, graph: Graph, pieces: OwnTimes, order: Ints) -> Durations:
    """Return the durations if ranks exchange their places.

    A place has a speed: the own time of its rank in relation to the lower median of all ranks with its role. The own times
    of a rank change by the speeds of its old and new place. The transfers of a communicator or pair whose members move take
    the median of the measured transfers of the same operation, number of members and size between the same places; if there
    are none, on the same hosts; if there are none, on as many hosts.

    Args:
        now: durations.
        graph, pieces: nodes and own times.
        order: int64 ``[ranks]``, position of the rank whose place each rank takes.

    Raises:
        FormatError: no such transfer was measured.
    """
    both = (pieces.own_ns, like_all(pieces, pieces.own_ns))
    own, like = (np.bincount(pieces.rank, each, minlength=len(order)) for each in both)
    speed = np.where((own > 0) & (like > 0), own / np.where(like > 0, like, 1.0), 1.0)
    moved = with_own_times(now, pieces, pieces.own_ns * (speed[order] / speed)[pieces.rank])
    return replace(moved, took_ns=_transfers_at(now.took_ns, graph, order))


def _transfers_at(took_ns: Floats, graph: Graph, order: Ints) -> Floats:
    """Return float64 ``[transfers]``: durations of the transfers at the new places of their members."""
    trace = graph.window.trace
    call = trace.calls[graph.transfers.call]
    party = parties_of_transfers(graph)
    operation = operations_of_transfers(graph)
    first = np.unique(party, return_index=True)[1].tolist()
    places = [_members(trace, call[at]) for at in first]
    wanted = [tuple(sorted(order[list(each)].tolist())) for each in places]
    kind = row_numbers(operation, call["bytes"], np.array([len(each) for each in places])[party])
    out = took_ns.copy()
    for at, (old, new) in enumerate(zip(places, wanted, strict=True)):
        if old == new:
            continue
        here = party == at
        for each in np.unique(kind[here]).tolist():
            like = np.unique(party[kind == each]).tolist()
            found = _alike(trace, places, new, like)
            if not found:
                raise FormatError(
                    f"no transfer like those of ranks {_text(trace, old)} was measured at the places of ranks "
                    f"{_text(trace, new)}, or on as many hosts"
                )
            out[here & (kind == each)] = np.median(took_ns[(kind == each) & np.isin(party, found)])
    return out


def _alike(trace: Trace, places: list[tuple[int, ...]], wanted: tuple[int, ...], parties: list[int]) -> list[int]:
    """Return the parties at these places; if there are none, on the same hosts; if there are none, on as many hosts."""
    hosts = [sorted(trace.hosts[rank] for rank in places[each]) for each in parties]
    own = sorted(trace.hosts[rank] for rank in wanted)
    same = [each for each in parties if places[each] == wanted]
    on_hosts = [each for each, names in zip(parties, hosts, strict=True) if names == own]
    as_many = [each for each, names in zip(parties, hosts, strict=True) if len(set(names)) == len(set(own))]
    return same or on_hosts or as_many


def _members(trace: Trace, call: np.void) -> tuple[int, ...]:
    """Return the positions of the ranks of a call's communicator or pair, ascending."""
    pair = (int(call["source"]), int(call["destination"]))
    ranks = pair if pair[0] >= 0 else trace.groups[int(call["comm"])].members
    return tuple(sorted(np.searchsorted(trace.ranks, ranks).tolist()))


def _text(trace: Trace, places: tuple[int, ...]) -> str:
    return ",".join(str(trace.ranks[place]) for place in places[:8]) + (",..." if len(places) > 8 else "")
