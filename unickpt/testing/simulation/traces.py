"""Traces of simulated steps of a large job, for the replay. The simulation shares no code with the replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay.trace import CALL, MARK, PAUSE, CallTable, Trace, TraceGroup
from unickpt.testing.simulation.calls import Disturbance, ProgramItem, play, program
from unickpt.testing.simulation.layout import ParallelLayout

_ELEMENT_BYTES = 4


def simulated_trace(
    layout: ParallelLayout,
    steps: int,
    microbatches: int,
    *,
    slow: Mapping[int, float] | None = None,
    jitter: Callable[[], float] = lambda: 1.0,
    tiled: bool = False,
) -> Trace:
    """Return the trace of a simulated job.

    Args:
        layout: parallel layout.
        steps: number of steps.
        microbatches: of each step.
        slow: factor of the computation of slow ranks.
        jitter: returns a factor for the duration of the next computation.
        tiled: simulate one data parallel replica, and let the others do the same at the same times. Not with ``slow``.
    """
    played_ranks = [rank for rank in range(layout.world) if not tiled or layout.place(rank)[1] == 0]
    programs, lengths = {}, {}
    for rank in played_ranks:
        factor = (slow or {}).get(rank, 1.0)
        items = [ProgramItem(int(item.compute_ns * factor), item.calls) for item in program(layout, rank, microbatches)]
        programs[rank] = items * steps
        lengths[rank] = sum(len(item.calls) for item in items)
    played = play(programs, {rank: Counter() for rank in programs}, Disturbance(), jitter)
    calls, marks = [], []
    for rank, records in played.items():
        out = np.zeros(len(records), CALL)
        sends, receives = records["op"] == Op.SEND, records["op"] == Op.RECEIVE
        out["rank"], out["comm"], out["root"] = rank, records["comm"], -1
        out["source"] = np.where(sends, rank, np.where(receives, records["peer"], -1))
        out["destination"] = np.where(receives, rank, np.where(sends, records["peer"], -1))
        for name in ("op", "seq", "call_ns", "wait_ns", "end_ns"):
            out[name] = records[name]
        out["bytes"] = records["elements_in"] * np.uint64(_ELEMENT_BYTES)
        calls.append(out)
        ends = records["end_ns"].reshape(steps, lengths[rank]).max(axis=1)
        mark = np.zeros(steps, MARK)
        mark["rank"], mark["number"], mark["end_ns"] = rank, np.arange(1, steps + 1), ends
        mark["begin_ns"] = np.append(0, ends[:-1])
        marks.append(mark)
    if tiled:
        calls, marks = _tiled(layout, calls), _tiled_marks(layout, marks)
    return Trace(
        np.arange(layout.world),
        tuple(f"host{at}" for at in layout.hosts().tolist()),
        tuple({"tp": tensor, "pp": stage, "dp": replica} for stage, replica, tensor in map(layout.place, range(layout.world))),
        _groups(layout),
        np.concatenate(calls),
        np.concatenate(marks),
        np.zeros(0, PAUSE),
    )


def _groups(layout: ParallelLayout) -> list[TraceGroup]:
    groups, none = layout.groups(), TraceGroup("", ())
    return [
        TraceGroup(groups[at].label, tuple(groups[at].members().tolist())) if at in groups else none
        for at in range(max(groups) + 1)
    ]


def _tiled(layout: ParallelLayout, calls: list[CallTable]) -> list[CallTable]:
    """Return the calls of all replicas from those of the first one."""
    found = []
    for replica in range(layout.dp):
        comm = np.arange(1 + layout.pp * (layout.dp + layout.tp) + layout.dp * layout.tp)
        for stage in range(layout.pp):
            comm[layout.tensor_group(stage, 0)] = layout.tensor_group(stage, replica)
        for tensor in range(layout.tp):
            comm[layout.pipeline_group(0, tensor)] = layout.pipeline_group(replica, tensor)
        for own in calls:
            out = own.copy()
            out["comm"] = comm[own["comm"]]
            for name in ("rank", "source", "destination"):
                out[name] = np.where(own[name] >= 0, own[name] + replica * layout.tp, -1)
            found.append(out)
    return found


def _tiled_marks(layout: ParallelLayout, marks: list[CallTable]) -> list[CallTable]:
    found = []
    for replica in range(layout.dp):
        for own in marks:
            out = own.copy()
            out["rank"] += replica * layout.tp
            found.append(out)
    return found
