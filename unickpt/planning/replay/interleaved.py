"""The step of a 1F1B pipeline if its stages had several chunks, with Megatron's interleaved schedule.

The records have the computation of each stage for one microbatch: the own time and the collectives in one unit of the steady
part. Both schedules are played with these times and the typical duration of a message. The step changes by their difference.
What is before and after the pipeline stays as it is.
"""

from __future__ import annotations

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.planning.replay.alike import stages_of
from unickpt.planning.replay.edits import Durations
from unickpt.planning.replay.graph import PAIRS, RETURNS, Graph
from unickpt.planning.replay.microbatches import units_of
from unickpt.planning.replay.programs import step_time

FORWARD = 1 / 3  # of the computation of a microbatch: a backward computation has two products for each one of the forward


def interleaved_gain_s(graph: Graph, now: Durations, chunks: int) -> float:
    """Return the seconds that a step becomes shorter. Each chunk takes the same part of a stage's time.

    Raises:
        FormatError: the job has no such pipeline, or a number of microbatches that the interleaved schedule does not allow.
    """
    stages = stages_of(graph.window.trace)
    count = int(stages.max(initial=0)) + 1
    computed, microbatches = _computation_s(graph, now)
    if count < 2:
        raise FormatError(f"{chunks} chunks: the records have no group of the pipeline, so its stages are unknown")
    if microbatches % count:
        raise FormatError(
            f"{chunks} chunks: Megatron's interleaved schedule needs a multiple of {count} microbatches, and a step has "
            f"{microbatches}"
        )
    longest = [float(computed[stages == stage].max()) for stage in range(count)]
    pairs = np.isin(graph.window.trace.calls["op"][graph.transfers.call], PAIRS) & ~graph.transfers.alone[graph.transfers.call]
    send_s = float(np.median(now.took_ns[pairs])) * 1e-9

    def played(parts: int) -> float:
        forward = [[each * FORWARD / parts] * parts for each in longest]
        backward = [[each * (1 - FORWARD) / parts] * parts for each in longest]
        return step_time(forward, backward, microbatches, send_s)

    return played(1) - played(chunks)


def _computation_s(graph: Graph, now: Durations) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], int]:
    """Return float64 ``[ranks]``: the computation of a microbatch on each rank, and the number of microbatches."""
    events, calls = graph.events, graph.window.trace.calls
    waited = events.kind == RETURNS
    collective = waited & ~np.isin(calls["op"][np.where(waited, events.call, 0)], PAIRS) if len(calls) else waited
    spent = now.own_ns + np.where(collective, now.took_ns[np.where(collective, events.transfer, 0)], 0.0)
    found: list[list[float]] = [[] for _ in graph.window.begin_ns]
    microbatches = 0
    for rank, units in units_of(graph):
        microbatches = units.microbatches
        if units.count < 2:
            continue
        # The first unit has the own time from the begin of the step to its first call.
        begin, end = units.first + units.length, units.first + units.count * units.length
        found[rank].append(float(spent[begin:end].sum()) / (units.count - 1) * 1e-9)
    return np.array([float(np.median(each)) if each else 0.0 for each in found]), microbatches
