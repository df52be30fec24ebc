"""When a running round grows: right after a checkpoint, and later each time for a host that comes and goes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import unickpt
from tests.unit.steering.checked_events import AT_ONCE, arrive, run, started
from unickpt.base.errors import UnickptError
from unickpt.base.round_folder import RINGS, RINGS_JOB, note_commit, note_saver, read_commits
from unickpt.steering.state.hosts import host_rows
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Committed, JobPhase, Left, Membership, Tick


def job(hosts: int = 2, **limits: object) -> Membership:
    """Return a job of at most three hosts."""
    return replace(
        started(hosts, 1, hosts), limits=Limits(1, 3, **{**AT_ONCE, "expiry_s": 1e9, "boundary_s": 1800.0, **limits})
    )  # type: ignore[arg-type]


def committed(state: Membership, count: int, now_s: float) -> Membership:
    assert state.round is not None
    return run(state, Committed("h1", "1", state.round.epoch, count), now_s=now_s)


def alive(state: Membership, now_s: float) -> Membership:
    """Let time pass in which all hosts are heard."""
    return run(replace(state, heard=dict.fromkeys(state.hosts, now_s)), Tick(), now_s=now_s)


def reason(state: Membership, host: str, now_s: float) -> str:
    return next(row.reason for row in host_rows(state, now_s) if row.host == host)


def test_a_round_grows_right_after_a_commit_when_the_framework_has_written_its_own_files() -> None:
    state = committed(job(join_s=30.0), 0, 1.0)
    state = arrive(alive(committed(state, 1, 60.0), 90.0), "h3", now_s=90.0)
    assert state.phase is JobPhase.RUNNING
    assert reason(state, "h3", 95.0) == "waits for the next checkpoint"
    state = committed(alive(state, 400.0), 2, 400.0)
    assert state.phase is JobPhase.RUNNING
    grown = alive(state, 401.0)
    assert (grown.phase, grown.reason, grown.commits) == (JobPhase.GATHERING, "h3 can be used", 2)
    missed = alive(state, 411.0)  # the leader was away: the steps since then would be lost
    assert missed.phase is JobPhase.RUNNING


def test_a_round_that_commits_all_the_time_grows_although_every_commit_is_new() -> None:
    state = committed(job(join_s=30.0), 0, 1.0)
    for at in range(200):
        state = committed(state, at + 1, 1.0 + 0.5 * at)
    assert arrive(alive(state, 100.6), "h3", now_s=100.6).phase is JobPhase.GATHERING


def test_a_round_without_checkpoints_waits_for_a_time_and_one_that_has_just_begun_does_not() -> None:
    limits = {"join_s": 30.0, "boundary_s": 100.0}
    state = committed(job(**limits), 0, 1.0)
    assert arrive(state, "h3", now_s=10.0).phase is JobPhase.GATHERING
    waits = arrive(alive(state, 50.0), "h3", now_s=50.0)
    assert alive(waits, 149.0).phase is JobPhase.RUNNING
    assert alive(waits, 150.0).phase is JobPhase.GATHERING


def test_a_job_that_does_not_say_when_it_saves_grows_at_once() -> None:
    assert arrive(alive(job(), 500.0), "h3", now_s=500.0).phase is JobPhase.GATHERING


def test_commits_are_of_the_running_round_and_only_more_of_them_count() -> None:
    state = committed(job(), 3, 5.0)
    assert committed(state, 2, 9.0) == committed(state, 3, 9.0)
    assert (state.commits, state.committed_s, committed(state, 2, 9.0).committed_s) == (3, 5.0, 5.0)
    assert run(state, Committed("h1", "1", (1, 9), 7), Committed("h9", "1", (1, 1), 7), now_s=5.0) == state


def test_a_host_that_comes_and_goes_waits_twice_as_long_each_time_but_a_round_without_it_takes_it() -> None:
    waits = []
    for losses in range(6):
        alone = replace(job(1, out_s=100.0, longest_out_s=350.0), losses={"h2": losses})
        alone = arrive(alone, "h2")
        waits.append(next((s for s in range(0, 500, 50) if alive(alone, float(s)).phase is JobPhase.GATHERING), None))
        gathering = arrive(arrive(alone, "h1"), "h2")
        assert gathering.round is not None
        assert len(gathering.round.members) == 2
    assert waits == [0, 0, 100, 200, 350, 350]
    assert reason(alone, "h2", 50.0) == "has left the job 5 times: waits for 350 s"


@pytest.mark.parametrize(("lasted_s", "left"), [(3599.0, {"h1": 3, "h2": 5, "h3": 2}), (3600.0, {"h2": 1, "h3": 2})])
def test_a_long_round_forgets_how_often_its_members_had_left_before(lasted_s: float, left: dict[str, int]) -> None:
    """A host that is upgraded once a month does not come and go."""
    state = replace(job(2, longest_out_s=3600.0), losses={"h1": 3, "h2": 4, "h3": 2})
    state = run(alive(state, lasted_s), Left("h2", "1"), now_s=lasted_s)
    assert state.phase is JobPhase.GATHERING
    assert state.losses == left


def test_workers_note_their_commits_and_other_jobs_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_saver()
    monkeypatch.setenv(RINGS, str(tmp_path))
    monkeypatch.setenv(RINGS_JOB, "job")
    note_commit()
    assert read_commits(tmp_path) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for expected in (0, 1, 2):
        note_saver()
        assert read_commits(tmp_path) == expected
        note_commit()
    for junk in (b"", b"-1", b"x" * 100, b"\xff"):
        (tmp_path / "commits").write_bytes(junk)
        assert read_commits(tmp_path) is None
    monkeypatch.setenv(RINGS, str(tmp_path / "gone"))
    note_commit()


def test_a_save_notes_its_commit_and_a_failed_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((RINGS, str(tmp_path)), (RINGS_JOB, "job"), ("TORCHELASTIC_RUN_ID", "job")):
        monkeypatch.setenv(name, value)
    assert unickpt.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "step1", step=1).committed
    assert read_commits(tmp_path) == 1
    (tmp_path / "file").touch()
    with contextlib.suppress(UnickptError, OSError):
        assert not unickpt.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "file" / "step2", step=2).committed
    assert read_commits(tmp_path) == 1
