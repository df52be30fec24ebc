"""Ranks that were started and record nothing: when they count as at fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import hung
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.steps import STEP


def waiting_for(folder: Path, since_s: float, state: State, pid: int = 17) -> Snapshot:
    """Return a job whose ranks wait for rank 2, of which there is no ring. The host may have been up for less long."""
    hung(folder, since_s=30)
    for ring in folder.glob("*00002*"):
        ring.unlink()
    seen = take_snapshot(read_folder(folder))
    return replace(seen, now_ns=seen.now_ns + int((since_s - 30) * 1e9), absent={2: AbsentRank(pid, "here", state)})


@pytest.mark.parametrize(
    ("since_s", "state", "pid", "named"),
    [
        (130, State.SLEEPING, 17, False), (590, State.RUNNING, 17, False), (610, State.SLEEPING, 17, True),
        (130, State.STOPPED, 17, True), (130, State.DEAD, 17, True), (130, State.UNKNOWN, 0, True),
    ],
)  # fmt: skip
def test_a_rank_that_lives_may_load_weights_before_it_records(
    tmp_path: Path, since_s: float, state: State, pid: int, named: bool
) -> None:
    found = examine(waiting_for(tmp_path, since_s, state, pid)).verdicts
    assert [verdict.ranks for verdict in found] == [(2,)] * named


def test_a_rank_without_records_in_a_job_that_makes_steps_is_not_timed(tmp_path: Path) -> None:
    seen = waiting_for(tmp_path, 3000, State.SLEEPING)
    assert examine(seen).verdicts
    steps = np.zeros(3, STEP)
    steps["rank"], steps["number"], steps["end_ns"] = (0, 1, 3), 1, int(1e9)
    assert examine(replace(seen, steps=steps)).verdicts == []
