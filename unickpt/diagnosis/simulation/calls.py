"""Calls of a training step, played until no rank can go on: who comes to stand where when one of them does something else.

A step is Megatron's one-forward-one-backward schedule: every microbatch is received, computed between all-reduces of the
tensor parallel group, and sent on; then gradients are reduced in the data parallel group, their norm in the world, and
parameters are gathered. Sends wait for their receivers.

Replicas that are sound all do the same: one of them is played, and the others are made from what its ranks have noted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unickpt.diagnosis.simulation.layout import WORLD, Layout
from unickpt.diagnosis.summaries import SUMMARY, Summaries, summary
from unickpt.timing.records import RECORD, Op, Records

MS = 1_000_000
FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS, TRANSFER_NS = 5 * MS, 10 * MS, 10 * MS, 2 * MS
TENSOR_CALLS = 2  # in each forward and backward computation
_ACTIVATIONS, _GRADIENTS, _NORM = 1 << 22, 1 << 26, 1

Sequence = tuple[int, int, int]  # communicator, source and destination; -1 twice for collectives


class Call(NamedTuple):
    """One call of a rank.

    Attributes:
        comm, source, destination: which sequence of calls it belongs to; -1 twice for collectives.
        op: what it is.
        elements, shape: of what it gives, and their hash.
    """

    comm: int
    op: Op
    elements: int
    shape: int = 1
    source: int = -1
    destination: int = -1

    @property
    def sequence(self) -> Sequence:
        return self.comm, self.source, self.destination


class Item(NamedTuple):
    """What a rank does next: it computes, makes calls all at once, and waits for one after the other."""

    compute_ns: int
    calls: tuple[Call, ...]


Program = list[Item]


def program(layout: Layout, rank: int, microbatches: int) -> Program:
    """One step of a rank."""
    stage, replica, tensor = layout.place(rank)
    pipeline = layout.pipeline_group(replica, tensor)
    before = layout.rank(stage - 1, replica, tensor) if stage else -1
    after = layout.rank(stage + 1, replica, tensor) if stage < layout.pp - 1 else -1

    def sent(to: int) -> tuple[Call, ...]:
        return (Call(pipeline, Op.SEND, _ACTIVATIONS, 1, rank, to),) if to >= 0 else ()

    def received(of: int) -> tuple[Call, ...]:
        return (Call(pipeline, Op.RECEIVE, _ACTIVATIONS, 1, of, rank),) if of >= 0 else ()

    def computed(ns: int) -> Program:
        reduced = Call(layout.tensor_group(stage, replica), Op.ALL_REDUCE, _ACTIVATIONS)
        return [Item(ns // TENSOR_CALLS, (reduced,) if layout.tp > 1 else ())] * TENSOR_CALLS

    warm_up = min(layout.pp - stage - 1, microbatches)
    steady = microbatches - warm_up
    found: Program = []
    for _ in range(warm_up):
        found += [Item(0, received(before)), *computed(FORWARD_NS), Item(0, sent(after))]
    if steady:
        found.append(Item(0, received(before)))
    for at in range(steady):
        found += [*computed(FORWARD_NS), Item(0, sent(after) + received(after)), *computed(BACKWARD_NS)]
        found.append(Item(0, sent(before) + (received(before) if at < steady - 1 else ())))
    for _ in range(warm_up):
        found += [Item(0, received(after)), *computed(BACKWARD_NS), Item(0, sent(before))]
    data = layout.data_group(stage, tensor)
    if layout.dp > 1:
        found.append(Item(0, (Call(data, Op.REDUCE_SCATTER, _GRADIENTS),)))
    found.append(Item(0, (Call(WORLD, Op.ALL_REDUCE, _NORM),)))
    if layout.dp > 1:
        found.append(Item(OPTIMIZER_NS, (Call(data, Op.ALL_GATHER, _GRADIENTS // layout.dp),)))
    return [item for item in found if item.calls or item.compute_ns]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is not as it should be.

    Attributes:
        programs: of ranks that do something else.
        stops: ranks that do not come further than to an item of their program.
        within: whether such a rank has still made the item's calls, and others do not get what they need of it.
        lost: sequences of calls that end for nobody, from a number on.
    """

    programs: Mapping[int, Program] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    within: bool = False
    lost: Mapping[Sequence, int] = field(default_factory=dict)


class _Note(NamedTuple):
    """One call as it was made; ``end`` has one number, infinite until all have entered it."""

    rank: int
    call: Call
    seq: int
    at: float
    end: list[float]


@dataclass(slots=True)
class _Rank:
    """Where a rank is: its next item, its clock, how many calls it has made of each sequence, and what it waits for."""

    items: Program
    counts: Counter[Sequence]
    clock: float = 1.0
    next: int = 0
    notes: list[_Note] = field(default_factory=list)
    open: list[_Note] = field(default_factory=list)


def play(
    programs: Mapping[int, Program],
    counts: Mapping[int, Counter[Sequence]],
    disturbance: Disturbance,
    jitter: Callable[[], float],
) -> dict[int, Records]:
    """Let every rank go on until none can.

    Args:
        programs: of each rank that is played; a collective waits for all of them that have its communicator in theirs.
        counts: calls that each rank has made before, by their sequence.
        disturbance: what some of them do instead.
        jitter: gives a factor of how long the next computation takes.

    Returns:
        Records of every rank, on a clock that begins at 1 ns; communicators have their number in the job.
    """
    sizes: Counter[int] = Counter()
    for items in programs.values():
        sizes.update({call.comm for item in items for call in item.calls})
    ranks = {who: _Rank(disturbance.programs.get(who, items), Counter(counts[who])) for who, items in programs.items()}
    entered: dict[tuple[Sequence, int], list[_Note]] = defaultdict(list)
    todo = deque(ranks)
    while todo:
        who = todo.popleft()
        rank = ranks[who]
        if any(note.end[0] == math.inf for note in rank.open):
            continue
        rank.clock = max([rank.clock, *(note.end[0] for note in rank.open)])
        stops = disturbance.stops.get(who) == rank.next
        if rank.next == len(rank.items) or (stops and not disturbance.within):
            rank.open = []
            continue
        item = rank.items[rank.next]
        rank.next += 1
        rank.clock += item.compute_ns * jitter()
        rank.counts.update(call.sequence for call in item.calls)
        rank.open = [_Note(who, call, rank.counts[call.sequence], rank.clock, [math.inf]) for call in item.calls]
        rank.notes += rank.open
        if stops:  # it has made the calls, and the others get nothing of it
            continue
        if not item.calls:
            todo.append(who)
        for note in rank.open:
            there = entered[note.call.sequence, note.seq]
            there.append(note)
            lost = note.seq >= disturbance.lost.get(note.call.sequence, math.inf)
            alike = len({(each.call.op, each.call.shape) for each in there}) == 1 or note.call.source >= 0
            if len(there) == (sizes[note.call.comm] if note.call.source < 0 else 2) and alike and not lost:
                end = max(each.at for each in there) + TRANSFER_NS
                for each in there:
                    each.end[0] = end
                    todo.append(each.rank)
    return {who: _records(rank.notes) for who, rank in ranks.items()}


def _records(notes: list[_Note]) -> Records:
    out = np.zeros(len(notes), RECORD)
    out["begun"] = out["written"] = np.arange(1, len(notes) + 1)
    out["call_ns"] = out["wait_ns"] = [int(note.at) for note in notes]
    out["end_ns"] = [0 if note.end[0] == math.inf else int(note.end[0]) for note in notes]
    out["seq"], out["comm"] = [note.seq for note in notes], [note.call.comm for note in notes]
    out["op"], out["dtype"] = [int(note.call.op) for note in notes], 4
    out["elements_in"], out["shape"] = [note.call.elements for note in notes], [note.call.shape for note in notes]
    peers = [note.call.destination if note.call.op is Op.SEND else note.call.source for note in notes]
    out["peer"] = peers
    return out


def until(records: Records, now_ns: int) -> Records:
    """What a rank had noted at a moment."""
    found = records[records["call_ns"] <= now_ns].copy()
    found["end_ns"][found["end_ns"] > now_ns] = 0
    return found


def summaries(layout: Layout, played: Mapping[int, Records], replica: int, alike: int) -> Summaries:
    """Rows of all ranks of the job, from two replicas.

    Args:
        layout: of the job.
        played: records of all ranks of the two.
        replica: which one was disturbed.
        alike: the other one, which stands for all others; the same one, if there is no other.
    """
    numbers = np.arange(1 + layout.pp * (layout.dp + layout.tp) + layout.dp * layout.tp, dtype=np.int32)
    rows = np.concatenate([np.zeros(0, SUMMARY), *(summary(rank, records, numbers) for rank, records in played.items())])
    own = rows["rank"] // layout.tp % layout.dp
    others = np.array([each for each in range(layout.dp) if each != replica], np.int64)
    if not len(others):
        return rows
    like = rows[own == alike]
    shift = np.repeat(others - alike, len(like))
    found = np.tile(like, len(others))
    pairs = found["source"] >= 0
    tensor = (found["comm"] > WORLD) & (found["comm"] < layout.data_group(0, 0))
    for column in ("rank", "source", "destination"):
        found[column] += np.where(pairs | (column == "rank"), shift * layout.tp, 0)
    found["comm"] += np.where(pairs, shift * layout.tp, np.where(tensor, shift, 0))
    return np.concatenate([rows[own == replica], found])
