"""Time of a step of a pipeline, by playing the programs of its stages.

Without chunks, a message holds up both sides until both are there, as ``send`` and ``recv`` of gloo and NCCL do. Megatron posts
the messages of both directions together (core/pipeline_parallel/schedules.py). DeepSpeed sends an activation only when it has
received the gradient that comes next (runtime/pipe/schedule.py). The interleaved schedule is Megatron's, and its messages hold
up only their receivers.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class PipelineSchedule(enum.Enum):
    """Whose 1F1B schedule it is."""

    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"


class Work(NamedTuple):
    """One computation of a stage.

    Attributes:
        backward: whether it is a backward computation.
        chunk: chunk of the stage.
        microbatch: microbatch, from 0.
    """

    backward: bool
    chunk: int
    microbatch: int


class StageMessage(NamedTuple):
    """An activation or a gradient from one stage to the next or to the one before."""

    gradient: bool
    source: int
    microbatch: int

    @property
    def target(self) -> int:
        return self.source + (-1 if self.gradient else 1)


class Item(NamedTuple):
    """Part of a stage's program: it posts messages, waits for all of them, and computes."""

    messages: tuple[StageMessage, ...]
    work: Work | None


def order_of(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Work]:
    """Return the computations of a stage in their order.

    Args:
        stage, stages: place in the pipeline, and its length.
        microbatches: of a step. With several chunks, a multiple of ``stages``.
        chunks: chunks of each stage; 1 is the schedule 1F1B.
    """
    total = microbatches * chunks
    warm_up = min(stages - stage - 1, total) if chunks == 1 else min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    forward = [_virtual(at, stages, chunks, backward=False) for at in range(total)]
    backward = [_virtual(at, stages, chunks, backward=True) for at in range(total)]
    found = forward[:warm_up]
    for at in range(warm_up, total):
        found += [forward[at], backward[at - warm_up]]
    return found + backward[total - warm_up :]


def _virtual(at: int, stages: int, chunks: int, *, backward: bool) -> Work:
    if chunks == 1:
        return Work(backward, 0, at)
    turn, place = divmod(at, stages * chunks)
    chunk, microbatch = divmod(place, stages)
    return Work(backward, chunks - 1 - chunk if backward else chunk, turn * stages + microbatch)


def in_flight(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[int]:
    """Return for each chunk of a stage the number of microbatches whose activations it keeps at once.

    The numbers are those at the moment at which their sum is the largest.
    """
    kept, best = [0] * chunks, [0] * chunks
    for work in order_of(stage, stages, microbatches, chunks):
        kept[work.chunk] += -1 if work.backward else 1
        if sum(kept) > sum(best):
            best = kept.copy()
    return best


def program(stage: int, stages: int, microbatches: int, schedule: PipelineSchedule) -> list[Item]:
    """Return the program of a stage without chunks."""
    if schedule is PipelineSchedule.DEEPSPEED:
        return _deepspeed_program(stage, stages, microbatches)
    order = order_of(stage, stages, microbatches)
    found: list[Item] = []
    pending: tuple[StageMessage, ...] = ()  # what the computation before has made
    warm_up = min(stages - stage - 1, microbatches)
    for at, work in enumerate(order):
        needed, made = _messages(stage, stages, work)
        steady = warm_up < at < len(order) - warm_up  # sends what it has made together with what it needs next
        if not steady and pending:
            found.append(Item(pending, None))
            pending = ()
        found.append(Item((*pending, *needed), work))
        pending = made
    return [*found, Item(pending, None)] if pending else found


def _deepspeed_program(stage: int, stages: int, microbatches: int) -> list[Item]:
    """Return DeepSpeed's program: slots for forward and backward computations in turn, of which the first and last are empty.

    A result is sent in the next slot, a gradient before an activation is received, an activation after a gradient is.
    """
    found: list[Item] = []
    before: Work | None = None
    for slot in range(2 * (microbatches + stages - 1)):
        backward = (slot + stage) % 2 == 1
        first = 2 * stages - 1 - stage if backward else stage  # slot of microbatch 0
        microbatch = (slot - first) // 2
        work = Work(backward, 0, microbatch) if 0 <= microbatch < microbatches else None
        needed = _messages(stage, stages, work)[0] if work is not None else ()
        made = _messages(stage, stages, before)[1] if before is not None else ()
        found += [Item(part, None) for part in ((needed, made) if backward else (made, needed)) if part]
        if work is not None:
            found.append(Item((), work))
        before = work
    made = _messages(stage, stages, before)[1] if before is not None else ()
    return [*found, Item(made, None)] if made else found


def _messages(stage: int, stages: int, work: Work) -> tuple[tuple[StageMessage, ...], tuple[StageMessage, ...]]:
    """Return what a computation receives and what it sends."""
    source, ends = (stage + 1, stages - 1) if work.backward else (stage - 1, 0)
    last = 0 if work.backward else stages - 1
    needed = (StageMessage(work.backward, source, work.microbatch),) if stage != ends else ()
    made = (StageMessage(work.backward, stage, work.microbatch),) if stage != last else ()
    return needed, made


def step_time(
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    microbatches: int,
    send_s: float = 0.0,
    schedule: PipelineSchedule = PipelineSchedule.MEGATRON,
) -> float:
    """Return the seconds until the last stage is done.

    Args:
        forward_s, backward_s: ``[stages][chunks]``, time for one microbatch.
        microbatches: of a step.
        send_s: time of a transfer between two stages.
        schedule: whose schedule; with several chunks it is Megatron's.
    """
    if len(forward_s[0]) > 1:
        return _interleaved(forward_s, backward_s, microbatches, send_s)
    stages = len(forward_s)
    programs = [program(stage, stages, microbatches, schedule) for stage in range(stages)]
    posted: dict[StageMessage, list[float]] = defaultdict(list)
    clock, place, waits = [0.0] * stages, [0] * stages, [False] * stages
    todo = list(range(stages))
    while todo:
        stage = todo.pop()
        while place[stage] < len(programs[stage]):
            item = programs[stage][place[stage]]
            if not waits[stage]:
                for message in item.messages:
                    posted[message].append(clock[stage])
                    todo.append(message.target if message.source == stage else message.source)
                waits[stage] = True
            if any(len(posted[message]) < 2 for message in item.messages):
                break
            clock[stage] = max([clock[stage], *(max(posted[message]) + send_s for message in item.messages)])
            if item.work is not None:
                clock[stage] += (backward_s if item.work.backward else forward_s)[stage][0]
            place[stage] += 1
            waits[stage] = False
    return max(clock)


def _interleaved(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], microbatches: int, send_s: float
) -> float:
    stages, chunks = len(forward_s), len(forward_s[0])
    orders = [order_of(stage, stages, microbatches, chunks) for stage in range(stages)]
    ends: dict[tuple[int, Work], float] = {}
    clock, place = [0.0] * stages, [0] * stages
    todo = list(range(stages))
    while todo:
        stage = todo.pop()
        while place[stage] < len(orders[stage]):
            work = orders[stage][place[stage]]
            needed = _needed(stage, work, stages, chunks)
            if needed is not None and needed not in ends:
                break
            ready = 0.0 if needed is None else ends[needed] + (send_s if needed[0] != stage else 0.0)
            clock[stage] = max(clock[stage], ready) + (backward_s if work.backward else forward_s)[stage][work.chunk]
            ends[stage, work] = clock[stage]
            place[stage] += 1
            todo.append((stage + (-1 if work.backward else 1)) % stages)
    return max(clock)


def _needed(stage: int, work: Work, stages: int, chunks: int) -> tuple[int, Work] | None:
    """Return the computation whose result this one needs; None for the first one of a microbatch."""
    backward, chunk, microbatch = work
    if not backward:
        if stage:
            return stage - 1, work
        return (stages - 1, Work(False, chunk - 1, microbatch)) if chunk else None
    if stage < stages - 1:
        return stage + 1, work
    return (0, Work(True, chunk + 1, microbatch)) if chunk < chunks - 1 else (stage, Work(False, chunk, microbatch))
