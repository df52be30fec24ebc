"""Handmade rings and snapshots of jobs, for the tests of the agent."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import SUFFIX, Identity, RingWriter
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import CALL, GroupInfo, Snapshot
from unickpt.diagnosis.snapshot.steps import STEP

MS, S = 1_000_000, 1_000_000_000


def ring(folder: Path, rank: int, world: int = 4, *, label: str = "data parallel", pid: int | None = None) -> RingWriter:
    """Return a ring of this or another process, with one group of all ranks."""
    who = dataclasses.replace(Identity.here(rank, world, "job"), pid=pid or os.getpid())
    made = RingWriter(folder / f"{rank:05d}{SUFFIX}", who, capacity=256)
    made.list_communicator({"name": "g", "label": label, "backend": "gloo", "ranks": progressions(range(world))})
    return made


def call(
    to: RingWriter, number: int, call_ns: int, end_ns: int, *, step: int = 20, seq: int = 0, op: Op = Op.ALL_REDUCE
) -> None:
    """Return a call that its rank waits for since its start."""
    to.put(number, call_ns, 0, call_ns, end_ns, seq or number, 8, 8, 0, int(op), 2, 0, 0, 0, -1, 0, step, 7)


def hung(folder: Path, *, culprit: int = 2, since_s: float = 30, world: int = 4, **state: Any) -> None:
    """All ranks except one entered call 3 the given number of seconds ago."""
    now = time.monotonic_ns()
    for rank in range(world):
        made = ring(folder, rank, world)
        for number in (1, 2):
            call(made, number, now - int((since_s + 10) * S), now - int((since_s + 9) * S))
        if rank != culprit:
            call(made, 3, now - int(since_s * S), 0)
        made.state(heartbeat_ns=now, step=20, newest=3, phase=int(state.get("phase", Phase.BACKWARD)))


def made_up(calls: list[tuple[int, int, int, int]], now_ns: int = 0) -> Snapshot:
    """Return a host with calls ``(rank, seq, call_ns, end_ns)`` of one group."""
    table = np.zeros(len(calls), CALL)
    table["source"] = table["destination"] = -1
    table["op"] = int(Op.ALL_REDUCE)
    for at, (rank, seq, call_ns, end_ns) in enumerate(calls):
        for name, value in zip(("rank", "seq", "call_ns", "end_ns"), (rank, seq, call_ns, end_ns), strict=True):
            table[name][at] = value
    return Snapshot(now_ns, {}, [GroupInfo("g", "", ((0, 1, 8),))], np.zeros(0, PROGRESS), np.zeros(0, STEP), table)
