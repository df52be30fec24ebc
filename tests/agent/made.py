"""Rings and views of jobs that never ran, for the tests of the agent."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.diagnosis.steps import STEP
from unickpt.diagnosis.summaries import SUMMARY
from unickpt.diagnosis.view import CALL, Group, View
from unickpt.timing.ranks import progressions
from unickpt.timing.records import Op, Phase
from unickpt.timing.ring import SUFFIX, Identity, RingWriter

MS, S = 1_000_000, 1_000_000_000


def ring(folder: Path, rank: int, world: int = 4, *, label: str = "data parallel", pid: int | None = None) -> RingWriter:
    """A ring of this process, or of another one, with one group of all ranks in its table."""
    who = dataclasses.replace(Identity.here(rank, world, "job"), pid=pid or os.getpid())
    made = RingWriter(folder / f"{rank:05d}{SUFFIX}", who, capacity=256)
    made.list_communicator({"name": "g", "label": label, "backend": "gloo", "ranks": progressions(range(world))})
    return made


def call(
    to: RingWriter, number: int, call_ns: int, end_ns: int, *, step: int = 20, seq: int = 0, op: Op = Op.ALL_REDUCE
) -> None:
    """One that is waited for since it was made."""
    to.put(number, call_ns, 0, call_ns, end_ns, seq or number, 8, 8, 0, int(op), 2, 0, 0, 0, -1, 0, step, 7)


def hung(folder: Path, *, culprit: int = 2, since_s: float = 30, world: int = 4, **state: Any) -> None:
    """All ranks but one have entered call 3 so many seconds ago."""
    now = time.monotonic_ns()
    for rank in range(world):
        made = ring(folder, rank, world)
        for number in (1, 2):
            call(made, number, now - int((since_s + 10) * S), now - int((since_s + 9) * S))
        if rank != culprit:
            call(made, 3, now - int(since_s * S), 0)
        made.state(heartbeat_ns=now, step=20, newest=3, phase=int(state.get("phase", Phase.BACKWARD)))


def made_up(calls: list[tuple[int, int, int, int]], now_ns: int = 0) -> View:
    """A host of calls ``(rank, seq, call_ns, end_ns)`` of one group."""
    table = np.zeros(len(calls), CALL)
    table["source"] = table["destination"] = -1
    table["op"] = int(Op.ALL_REDUCE)
    for at, (rank, seq, call_ns, end_ns) in enumerate(calls):
        for name, value in zip(("rank", "seq", "call_ns", "end_ns"), (rank, seq, call_ns, end_ns), strict=True):
            table[name][at] = value
    return View(now_ns, {}, [Group("g", "", ((0, 1, 8),))], np.zeros(0, SUMMARY), np.zeros(0, STEP), table)
