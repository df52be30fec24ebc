"""Own time of ranks between their calls, compared with that of ranks with the same role.

The own time between two calls of a rank is one *piece*: all time in which the host did not wait, with the delays after its
waits. Two ranks have the same role in a step if they make the same calls of the same kinds of groups in the same order, and
are in the same pipeline stage. Their pieces can be compared one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Floats, Ints, row_numbers
from unickpt.diagnosis.detectors.medians import medians_of_others
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.graph import CALLED, STEP_ENDS, Graph
from unickpt.planning.replay.trace import Trace

PAUSES = {"data": int(Op.DATA), "garbage collection": int(Op.GARBAGE), "checkpoint": int(Op.CHECKPOINT)}
_STAGE = "pp"


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """Own times by piece: arrays ``[pieces]``.

    Attributes:
        of_event: int64 ``[events]``, piece of each event.
        rank, step: int64: position of the rank, and of the step in the window.
        own_ns: float64: own time.
        pauses_ns: part of it in waits for data, garbage collections and checkpoints, by name of ``PAUSES``.
        role: int64: role of the rank in the step. Pieces are sorted by rank and time.
        place: int64: position of the piece in its step.
        last_event: int64: event that ends the piece.
    """

    of_event: Ints
    rank: Ints
    step: Ints
    own_ns: Floats
    pauses_ns: dict[str, Floats]
    role: Ints
    place: Ints
    last_event: Ints

    @property
    def work_ns(self) -> Floats:
        """Own time without pauses."""
        return np.maximum(self.own_ns - sum(self.pauses_ns.values()), 0.0)


def pieces_of(graph: Graph) -> OwnTimes:
    """Return the own times of a graph."""
    events, trace = graph.events, graph.window.trace
    ends = np.flatnonzero((events.kind == CALLED) | (events.kind == STEP_ENDS))
    of_event = np.searchsorted(ends, np.arange(len(events.rank)))
    own = np.bincount(of_event, events.own_ns, minlength=len(ends)).astype(np.float64)
    rank, step_end = events.rank[ends], events.kind[ends] == STEP_ENDS
    steps = len(graph.window.steps)
    step = np.cumsum(step_end) - step_end - rank * steps
    new = np.append(True, (step[1:] != step[:-1]) | (rank[1:] != rank[:-1]))
    first = np.flatnonzero(new)
    lengths = np.diff(np.append(first, len(ends)))
    place = np.arange(len(ends)) - np.repeat(first, lengths)
    role = _roles(graph, ends, first, lengths, place)
    pauses = {name: np.minimum(_paused(trace, op, graph, ends), own) for name, op in PAUSES.items()}
    return OwnTimes(of_event, rank, step, own, pauses, role, place, ends)


def work_of_ranks(graph: Graph, pieces: OwnTimes) -> dict[int, float]:
    """Return the seconds of a step that each global rank computes."""
    ranks, steps = graph.window.trace.ranks, len(graph.window.steps)
    work = np.bincount(pieces.rank, pieces.work_ns, minlength=len(ranks)) * 1e-9 / steps
    return dict(zip(ranks.tolist(), work.tolist(), strict=True))


def stages_of(trace: Trace) -> Ints:
    """Return int64 ``[ranks]``: pipeline stage of each rank; 0 where it has none."""
    return np.array([place.get(_STAGE, 0) for place in trace.places], np.int64)


def _roles(graph: Graph, ends: Ints, first: Ints, lengths: Ints, place: Ints) -> Ints:
    """Return the role of each piece's rank in its step, the same number for ranks with the same calls in the same stage."""
    trace, events = graph.window.trace, graph.events
    labels: dict[str, int] = {}
    label = np.array([labels.setdefault(group.label, len(labels)) for group in trace.groups] or [0], np.int64)
    is_call = events.kind[ends] == CALLED
    call = trace.calls[events.call[ends][is_call]]
    what = np.zeros(len(ends), np.uint64)
    what[is_call] = (call["op"].astype(np.int64) << 16 | label[call["comm"]]).astype(np.uint64) + np.uint64(1)
    mixed = what * np.uint64(0x9E3779B97F4A7C15) + place.astype(np.uint64)
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    sums = np.add.reduceat(mixed, first) if len(first) else mixed
    ranks = events.rank[ends[first]]
    step = np.cumsum(np.append(0, np.diff(ranks) != 0))  # of the rows, only to name them
    number = np.arange(len(first)) - np.flatnonzero(np.append(True, np.diff(ranks) != 0))[step]
    return np.repeat(row_numbers(sums.view(np.int64), lengths, stages_of(trace)[ranks], number), lengths)


def _paused(trace: Trace, op: int, graph: Graph, ends: Ints) -> Floats:
    """Return the pauses within each piece, by the begin of the pause."""
    found = trace.pauses[trace.pauses["op"] == op]
    out = np.zeros(len(ends))
    if not len(found):
        return out
    rank, at = graph.events.rank[ends], graph.events.at_ns[ends]
    for each in np.unique(found["rank"]).tolist():
        own = found[found["rank"] == each]
        here = np.flatnonzero(rank == each)
        piece = here[np.minimum(np.searchsorted(at[here], own["begin_ns"], side="right"), len(here) - 1)]
        np.add.at(out, piece, (own["end_ns"] - own["begin_ns"]).astype(np.float64))
    return out


def like_others(pieces: OwnTimes, values: Floats, *, without: Ints | None = None) -> Floats:
    """Return float64 ``[pieces]``: median of the same piece of other ranks with this role; NaN without such a rank.

    Args:
        pieces: own times.
        values: float64 ``[pieces]``, value of each piece.
        without: int64 ``[ranks]``, party of each rank. Only ranks of other parties count; default: each rank is a party.
    """
    out = np.full(len(values), np.nan)
    for rows in _by_role(pieces):
        table = values[rows]
        if without is None:
            out[rows] = medians_of_others(table)
            continue
        party = without[pieces.rank[rows[:, 0]]]
        for each in np.unique(party).tolist():
            if (party != each).any():
                out[rows[party == each]] = np.median(table[party != each], axis=0)
    return out


def like_all(pieces: OwnTimes, values: Floats) -> Floats:
    """Return float64 ``[pieces]``: lower median of the same piece of all ranks with this role.

    With two ranks the lower median is the faster one: one of two ranks that is slow does not raise the ideal.
    """
    out = np.empty(len(values))
    for rows in _by_role(pieces):
        out[rows] = np.sort(values[rows], axis=0)[(len(rows) - 1) // 2]
    return out


def _by_role(pieces: OwnTimes) -> list[Ints]:
    """Return for each role int64 ``[ranks, pieces of a step]``: numbers of the pieces."""
    order = np.lexsort((pieces.place, pieces.rank, pieces.role))
    role = pieces.role[order]
    starts = np.flatnonzero(np.append(True, role[1:] != role[:-1])) if len(role) else np.zeros(0, np.int64)
    found = []
    for lo, hi in zip(starts.tolist(), [*starts[1:].tolist(), len(role)], strict=True):
        members = int((pieces.place[order[lo:hi]] == 0).sum())
        found.append(order[lo:hi].reshape(members, -1))
    return found
