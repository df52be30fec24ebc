"""Graph of a job from a table of its operations on several streams.

Our own records are chains of the hosts. Traces of other recorders have operations on the streams of a device: computation,
messages of the pipeline in four directions, collectives of the data-parallel group, and the end of the step. This module has
the dependencies between them, as ByteDance's straggler analysis defines them (arXiv 2505.05713). The operations of one
*replica*, that is, of one place in the data-parallel group, depend on each other in the same way in every replica and step.

- computations of a stage run one after the other, and so do the messages of one direction, and the collectives of parameters
  and gradients
- a message is sent after its computation; a computation waits for the message that it needs, which is expected from the end of
  the computation of this direction before it
- the first forward computation of a model chunk waits for its parameters; gradients are reduced after its last backward
  computation, or after all computations if nothing of this is overlapped
- the end of the step is one chain: garbage collection, gradients of norms, of embeddings, reduction, clipping, optimizer

A transfer starts when all its members have called. Each member goes on after a duration of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.base.errors import FormatError
from unickpt.planning.replay.graph import CALLED, RETURNS, STEP_ENDS, Events, Graph, Transfers
from unickpt.planning.replay.schedule import Levels, schedule_of, simulate
from unickpt.planning.replay.trace import CALL, MARK, PAUSE, Trace, Window

FORWARD, BACKWARD = "forward-compute", "backward-compute"
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
PARAMETERS, GRADIENTS, REST = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
NORMS, EMBEDDINGS, CLIPPING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
GARBAGE, OPTIMIZER = "gc", "optimizer"
COMMUNICATION = (*MESSAGES, PARAMETERS, GRADIENTS, REST, NORMS, EMBEDDINGS, CLIPPING)
KINDS = (FORWARD, BACKWARD, *COMMUNICATION, GARBAGE, OPTIMIZER)
_ALL_REPLICAS = (PARAMETERS, GRADIENTS, REST, CLIPPING)  # transfers whose members are in all replicas
CLOCK_S = 5e-5  # moments this close are one moment
EARLY_S = 0.01  # a transfer that ends earlier than this before its last member calls takes no time


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of a job: ``ops`` of a replica, in the same way in each replica and step.

    Attributes:
        kind: ``[ops]``, one of ``KINDS``.
        number: int64 ``[ops]``, order among those of its kind and stage, from 0.
        stage: int64 ``[ops]``, pipeline stage.
        chunk, place: int64 ``[ops]``, model chunk in the stage, and in the whole model.
        begin_s, took_s: float64 ``[ops, replicas, steps]``, seconds; begins are on one clock for each step.
        steps: int64 ``[steps]``, their numbers.
        ranks: int64 ``[replicas, stages]``, global rank of each worker.
        reduces: whether gradients are reduced over several ranks.
    """

    kind: tuple[str, ...]
    number: Ints
    stage: Ints
    chunk: Ints
    place: Ints
    begin_s: Floats
    took_s: Floats
    steps: Ints
    ranks: Ints
    reduces: bool

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.ranks.shape[1])


@dataclass(frozen=True, slots=True)
class OperationGraph:
    """Graph of one step.

    Attributes:
        graph, schedule: nodes of all replicas, and their order.
        event: int64 ``[ops, replicas]``, event that each operation ends with.
        transfer: int64 ``[ops, replicas]``, transfer that it waits for.
        shared: bool ``[ops]``, whether it starts together with those of other workers.
    """

    graph: Graph
    schedule: Levels
    event: Ints
    transfer: Ints
    shared: npt.NDArray[np.bool_]

    def step_times(self, took_s: Floats) -> Floats:
        """Return float64 ``[steps]``: seconds from the begin of each step to the end of its last operation.

        Args:
            took_s: float64 ``[ops, replicas, steps]``, duration of each operation without the time that it waits for others.
        """
        own = np.zeros((len(self.graph.events.kind), took_s.shape[2]))
        own[self.event.reshape(-1)] = took_s.reshape(-1, took_s.shape[2]) * 1e9
        ends = simulate(self.graph, self.schedule, own, np.zeros((len(self.graph.transfers.call), took_s.shape[2])))
        longest: Floats = ends.max(axis=(0, 1)) * 1e-9
        return longest

    def without_waits(self, found: Operations) -> Floats:
        """Return float64 ``[ops, replicas, steps]``: durations; those of transfers from the call of the last member on."""
        last = np.full((len(self.graph.transfers.call), len(found.steps)), -np.inf)
        np.maximum.at(last, self.transfer.reshape(-1), found.begin_s.reshape(-1, len(found.steps)))
        took = found.begin_s + found.took_s - last[self.transfer]
        return np.where(self.shared[:, None, None], np.where(took > -EARLY_S, took, 0.0), found.took_s)


def graph_of_operations(found: Operations) -> OperationGraph:
    """Return the graph of one step of all replicas.

    Raises:
        FormatError: the operations are not those of a pipeline, or depend on each other in a circle.
    """
    needs, members, chains = _Dependencies(found).all()
    replicas, ops = found.begin_s.shape[1], len(found.kind)
    # Every chain has a first event, the events of its operations, and the end of the step.
    event_of, kinds, of_chain, firsts = np.zeros(ops, np.int64), list[int](), list[int](), list[int]()
    before: dict[int, int] = {}  # operation -> event before it in its chain
    for number, chain in enumerate(chains):
        firsts.append(len(kinds))
        for at, op in enumerate(chain):
            before[op] = len(kinds) + at
            event_of[op] = len(kinds) + 1 + at
        kinds += [CALLED, *[RETURNS] * len(chain), STEP_ENDS]
        of_chain += [number] * (len(chain) + 2)
    length = len(kinds)
    shift = np.arange(replicas) * length
    transfer, need, event = np.zeros((ops, replicas), np.int64), list[Ints](), list[Ints]()
    count = 0
    shared = np.zeros(ops, bool)
    for group, everywhere in members:
        needed = sorted({*(before[op] for op in group), *(int(event_of[each]) for op in group for each in needs.get(op, ()))})
        numbers = np.full(replicas, count) if everywhere else count + np.arange(replicas)
        transfer[group] = numbers
        need.append(np.repeat(numbers, len(needed)))
        event.append((shift[:, None] + np.array(needed)).reshape(-1))
        count += 1 if everywhere else replicas
    for group, everywhere in members:
        shared[group] = len(group) > 1 or everywhere or found.kind[group[0]] in (*MESSAGES, EMBEDDINGS)
    flat_need, flat_event = np.concatenate(need), np.concatenate(event)
    order = np.argsort(flat_need, kind="stable")
    events, nothing = replicas * length, np.zeros(0, np.int64)
    all_events = event_of[:, None] + shift
    waits = np.full(events, -1, np.int64)
    waits[all_events] = transfer
    rank = (np.array(of_chain) + np.arange(replicas)[:, None] * len(chains)).reshape(-1)
    zeros = np.zeros(events, np.int64)
    graph = Graph(
        _window(found, len(chains)),
        Events(rank, np.tile(np.array(kinds, np.int64), replicas), np.full(events, -1, np.int64), zeros, waits, zeros),
        Transfers(
            np.full(count, -1, np.int64),
            np.full(count, -1, np.int64),
            np.zeros(count, np.int64),
            flat_need[order],
            flat_event[order],
            nothing,
            np.zeros(0, bool),
        ),
    )
    return OperationGraph(graph, schedule_of(graph), all_events, transfer, shared)


def _window(found: Operations, chains: int) -> Window:
    """Return a window of one step that begins at 0 on each chain."""
    rows = found.ranks.shape[0] * chains
    zeros = np.zeros(rows, np.int64)
    trace = Trace(zeros, ("",) * rows, ({},) * rows, (), np.zeros(0, CALL), np.zeros(0, MARK), np.zeros(0, PAUSE))
    return Window(trace, found.steps[:1], zeros, zeros[:, None])


class _Dependencies:
    """Dependencies between the operations of a replica, from the order of the first replica's first step."""

    def __init__(self, found: Operations) -> None:
        self.found = found
        self.begin = found.begin_s[:, 0, 0]
        self.end = self.begin + found.took_s[:, 0, 0]
        self.needs: dict[int, list[int]] = {}
        self.members: list[tuple[list[int], bool]] = []
        self.overlapped = REST in found.kind

    def all(self) -> tuple[dict[int, list[int]], list[tuple[list[int], bool]], list[list[int]]]:
        """Return what each operation needs beside the one before it in its chain, members of transfers, and chains."""
        chains: list[list[int]] = []
        messages: dict[tuple[str, int], list[int]] = {}  # kind and stage -> those that have a peer
        for stage in range(self.found.stages):
            chains += self._stage(stage, messages)
        self._pairs(messages)
        known = {op for chain in chains for op in chain}
        left = sorted({self.found.kind[op] for op in range(len(self.found.kind)) if op not in known})
        if left:
            raise FormatError(f"the trace has operations without a place in a step: {', '.join(left)}")
        collected = {op for group, _ in self.members for op in group}
        self.members += [([op], self.found.kind[op] in _ALL_REPLICAS) for op in sorted(known - collected)]
        return self.needs, self.members, [chain for chain in chains if chain]

    def _of(self, stage: int, *kinds: str) -> list[int]:
        """Return the operations of some kinds, in their order."""
        here = [op for op, kind in enumerate(self.found.kind) if kind in kinds and self.found.stage[op] == stage]
        return sorted(here, key=lambda op: (float(self.begin[op]), int(self.found.number[op]), self.found.kind[op]))

    def _need(self, op: int, *others: int) -> None:
        self.needs.setdefault(op, []).extend(others)

    def _stage(self, stage: int, messages: dict[tuple[str, int], list[int]]) -> list[list[int]]:
        """Add what the operations of a stage need, and return its chains."""
        compute = self._of(stage, FORWARD, BACKWARD)
        for kind in (FORWARD, BACKWARD, OPTIMIZER):
            if not self._of(stage, kind):
                raise FormatError(f"the trace has no operation {kind} of stage {stage}")
        for kind in MESSAGES:
            messages[kind, stage] = self._match(stage, kind)
        first_back = next((at for at, op in enumerate(compute) if self.found.kind[op] == BACKWARD), 0)
        if first_back >= 2:
            for kind in ("backward-recv", "backward-send"):
                for op in self._of(stage, kind)[:1]:
                    self._need(op, compute[first_back - 2])
        collectives = self._of(stage, PARAMETERS, GRADIENTS)
        if not self.found.reduces and collectives:
            raise FormatError("the trace has collectives of a data-parallel group, but the job has none by its description")
        self._parameters(stage, compute)
        end = [*self._of(stage, NORMS), *self._of(stage, EMBEDDINGS)]
        last = max(compute, key=lambda op: float(self.end[op]))
        gradients = self._of(stage, GRADIENTS)
        if self.overlapped:
            self._gradients(stage, compute)
            streams = [collectives]
            end += self._of(stage, REST)
            before = [last, *gradients[-1:]]
        else:
            streams = [self._of(stage, PARAMETERS)]
            end += gradients
            before = [last]
            if gradients and streams[0]:
                self._need(gradients[0], streams[0][-1])
        end += [*self._of(stage, CLIPPING), *self._of(stage, OPTIMIZER)]
        garbage = self._of(stage, GARBAGE)
        for op in garbage[:1]:
            self._need(op, last)
        self._need(end[0], *before)
        return [compute, *[self._of(stage, kind) for kind in MESSAGES], *streams, garbage + end]

    def _match(self, stage: int, kind: str) -> list[int]:
        """Match messages with computations; return those with a peer. Recorded messages that nothing sent have none."""
        direction, side = kind.split("-")
        compute = self._of(stage, f"{direction}-compute")
        ops = self._of(stage, kind)
        if side == "recv":
            latest = max(float(self.begin[op]) for op in compute) + CLOCK_S
            ops = [op for op in ops if float(self.begin[op]) <= latest]
        else:
            earliest = min(float(self.end[op]) for op in compute) - CLOCK_S
            ops = [op for op in ops if float(self.end[op]) >= earliest]
        missing = len(compute) - len(ops)
        if ops and missing not in (0, 1):
            raise FormatError(f"stage {stage} has {len(ops)} operations {kind}, and {len(compute)} computations for them")
        with_peer = []
        last_place = self.found.place.max()
        by_number = {int(self.found.number[op]): op for op in compute}
        for at, op in enumerate(ops, start=missing if ops and side == "recv" else 0):
            own = by_number[at]
            if side == "send":
                self._need(op, own)
            else:
                self._need(own, op)
                if at:
                    self._need(op, by_number[at - 1])
            peer = int(self.found.place[own]) + (1 if (direction == "forward") == (side == "send") else -1)
            if 0 <= peer <= last_place:
                with_peer.append(op)
        return with_peer

    def _pairs(self, messages: dict[tuple[str, int], list[int]]) -> None:
        """Add the transfers with more than one member in a replica."""
        stages = self.found.stages
        for stage in range(stages):
            for direction, ahead in (("forward", 1), ("backward", -1)):
                sent, received = messages[f"{direction}-send", stage], messages[f"{direction}-recv", (stage + ahead) % stages]
                if len(sent) != len(received):
                    raise FormatError(f"stage {stage} sends {len(sent)} messages {direction}, and {len(received)} are received")
                self.members += [(list(pair), False) for pair in zip(sent, received, strict=True)]
        embeddings = sorted({op for stage in (0, stages - 1) for op in self._of(stage, EMBEDDINGS)})
        clipping = [op for stage in range(stages) for op in self._of(stage, CLIPPING)]
        self.members += [(group, everywhere) for group, everywhere in ((embeddings, False), (clipping, True)) if group]

    def _parameters(self, stage: int, compute: Sequence[int]) -> None:
        """The first forward computation of a chunk needs the last collective of its parameters."""
        last = {int(self.found.chunk[op]): op for op in self._of(stage, PARAMETERS)}
        for op in compute:
            if self.found.kind[op] == FORWARD and int(self.found.chunk[op]) in last:
                self._need(op, last.pop(int(self.found.chunk[op])))

    def _gradients(self, stage: int, compute: Sequence[int]) -> None:
        """The first reduction of a chunk's gradients needs its last backward computation."""
        latest: dict[int, int] = {}
        for op in sorted(compute, key=lambda each: float(self.end[each])):
            if self.found.kind[op] == BACKWARD:
                latest[int(self.found.chunk[op])] = op
        for op in self._of(stage, GRADIENTS):
            chunk = int(self.found.chunk[op])
            if chunk in latest:
                self._need(op, latest.pop(chunk))
