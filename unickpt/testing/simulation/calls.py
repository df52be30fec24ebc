"""Calls of a training step, played until no rank can continue: the call in which each rank waits if one rank deviates.

A step is Megatron's one-forward-one-backward schedule: every microbatch is received, computed between all-reduces of the
tensor parallel group, and sent on; then gradients are reduced in the data parallel group, their norm in the world, and
parameters are gathered. Sends wait for their receivers.

All sound replicas behave in the same way: one of them is played, and its records are copied for the others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unickpt.diagnosis.recording.records import RECORD, Op, Records
from unickpt.diagnosis.snapshot.progress import PROGRESS, ProgressTable, rank_progress
from unickpt.testing.simulation.layout import WORLD, ParallelLayout

MS = 1_000_000
FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS, TRANSFER_NS = 5 * MS, 10 * MS, 10 * MS, 2 * MS
TENSOR_CALLS = 2  # in each forward and backward computation
_ACTIVATIONS, _GRADIENTS, _NORM = 1 << 22, 1 << 26, 1

CallSequence = tuple[int, int, int]  # communicator, source and destination; -1 twice for collectives


class SimulatedCall(NamedTuple):
    """One call of a rank.

    Attributes:
        comm, source, destination: sequence that the call belongs to; source and destination are -1 for collectives.
        op: operation.
        elements, shape: number of elements sent, and hash of the shape.
    """

    comm: int
    op: Op
    elements: int
    shape: int = 1
    source: int = -1
    destination: int = -1

    @property
    def sequence(self) -> CallSequence:
        return self.comm, self.source, self.destination


class ProgramItem(NamedTuple):
    """One item of a rank's program: it computes, issues all calls, and waits for them in order."""

    compute_ns: int
    calls: tuple[SimulatedCall, ...]


Program = list[ProgramItem]


def program(layout: ParallelLayout, rank: int, microbatches: int) -> Program:
    """Return the program of one step of a rank."""
    stage, replica, tensor = layout.place(rank)
    pipeline = layout.pipeline_group(replica, tensor)
    before = layout.rank(stage - 1, replica, tensor) if stage else -1
    after = layout.rank(stage + 1, replica, tensor) if stage < layout.pp - 1 else -1

    def sent(to: int) -> tuple[SimulatedCall, ...]:
        return (SimulatedCall(pipeline, Op.SEND, _ACTIVATIONS, 1, rank, to),) if to >= 0 else ()

    def received(of: int) -> tuple[SimulatedCall, ...]:
        return (SimulatedCall(pipeline, Op.RECEIVE, _ACTIVATIONS, 1, of, rank),) if of >= 0 else ()

    def computed(ns: int) -> Program:
        reduced = SimulatedCall(layout.tensor_group(stage, replica), Op.ALL_REDUCE, _ACTIVATIONS)
        return [ProgramItem(ns // TENSOR_CALLS, (reduced,) if layout.tp > 1 else ())] * TENSOR_CALLS

    warm_up = min(layout.pp - stage - 1, microbatches)
    steady = microbatches - warm_up
    found: Program = []
    for _ in range(warm_up):
        found += [ProgramItem(0, received(before)), *computed(FORWARD_NS), ProgramItem(0, sent(after))]
    if steady:
        found.append(ProgramItem(0, received(before)))
    for at in range(steady):
        found += [*computed(FORWARD_NS), ProgramItem(0, sent(after) + received(after)), *computed(BACKWARD_NS)]
        found.append(ProgramItem(0, sent(before) + (received(before) if at < steady - 1 else ())))
    for _ in range(warm_up):
        found += [ProgramItem(0, received(after)), *computed(BACKWARD_NS), ProgramItem(0, sent(before))]
    data = layout.data_group(stage, tensor)
    if layout.dp > 1:
        found.append(ProgramItem(0, (SimulatedCall(data, Op.REDUCE_SCATTER, _GRADIENTS),)))
    found.append(ProgramItem(0, (SimulatedCall(WORLD, Op.ALL_REDUCE, _NORM),)))
    if layout.dp > 1:
        found.append(ProgramItem(OPTIMIZER_NS, (SimulatedCall(data, Op.ALL_GATHER, _GRADIENTS // layout.dp),)))
    return [item for item in found if item.calls or item.compute_ns]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Deviation from the sound programs.

    Attributes:
        programs: programs of deviating ranks.
        stops: position in the program at which ranks stop.
        within: whether a stopping rank still makes the calls of that item, which then do not end for the others.
        lost: sequences of calls that do not end, from a sequence number on.
    """

    programs: Mapping[int, Program] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    within: bool = False
    lost: Mapping[CallSequence, int] = field(default_factory=dict)


class _Note(NamedTuple):
    """One call as it was made; ``end`` holds one number, infinite until all members have entered."""

    rank: int
    call: SimulatedCall
    seq: int
    at: float
    end: list[float]


@dataclass(slots=True)
class _Rank:
    """State of a rank: its next item, clock, number of calls in each sequence, and pending calls."""

    items: Program
    counts: Counter[CallSequence]
    clock: float = 1.0
    next: int = 0
    notes: list[_Note] = field(default_factory=list)
    open: list[_Note] = field(default_factory=list)


def play(
    programs: Mapping[int, Program],
    counts: Mapping[int, Counter[CallSequence]],
    disturbance: Disturbance,
    jitter: Callable[[], float],
) -> dict[int, Records]:
    """Play programs until no rank can continue.

    Args:
        programs: program of each rank that is played. A collective waits for all ranks with its communicator in their program.
        counts: number of earlier calls of each rank, by sequence.
        disturbance: deviations.
        jitter: returns a factor for the duration of the next computation.

    Returns:
        Records of every rank, on a clock that begins at 1 ns, with the job's numbers of communicators.
    """
    sizes: Counter[int] = Counter()
    for items in programs.values():
        sizes.update({call.comm for item in items for call in item.calls})
    ranks = {who: _Rank(disturbance.programs.get(who, items), Counter(counts[who])) for who, items in programs.items()}
    entered: dict[tuple[CallSequence, int], list[_Note]] = defaultdict(list)
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
        if stops:  # its calls are made, and do not end for the others
            continue
        if not item.calls:
            todo.append(who)
        for note in rank.open:
            there = entered[note.call.sequence, note.seq]
            there.append(note)
            lost = note.seq >= disturbance.lost.get(note.call.sequence, math.inf)
            matching = len({(each.call.op, each.call.shape) for each in there}) == 1 or note.call.source >= 0
            if len(there) == (sizes[note.call.comm] if note.call.source < 0 else 2) and matching and not lost:
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
    """Return the records of a rank as of ``now_ns``."""
    found = records[records["call_ns"] <= now_ns].copy()
    found["end_ns"][found["end_ns"] > now_ns] = 0
    return found


def job_progress(layout: ParallelLayout, played: Mapping[int, Records], replica: int, sound: int) -> ProgressTable:
    """Return the progress of all ranks of the job from two replicas.

    Args:
        layout: layout of the job.
        played: records of all ranks of both replicas.
        replica: the disturbed replica.
        sound: a sound replica, whose records are copied for all others; ``replica`` if there is only one.
    """
    numbers = np.arange(1 + layout.pp * (layout.dp + layout.tp) + layout.dp * layout.tp, dtype=np.int32)
    rows = np.concatenate([np.zeros(0, PROGRESS), *(rank_progress(rank, records, numbers) for rank, records in played.items())])
    own = rows["rank"] // layout.tp % layout.dp
    others = np.array([each for each in range(layout.dp) if each != replica], np.int64)
    if not len(others):
        return rows
    copied = rows[own == sound]
    shift = np.repeat(others - sound, len(copied))
    found = np.tile(copied, len(others))
    pairs = found["source"] >= 0
    tensor = (found["comm"] > WORLD) & (found["comm"] < layout.data_group(0, 0))
    for column in ("rank", "source", "destination"):
        found[column] += np.where(pairs | (column == "rank"), shift * layout.tp, 0)
    found["comm"] += np.where(pairs, shift * layout.tp, np.where(tensor, shift, 0))
    return np.concatenate([rows[own == replica], found])
