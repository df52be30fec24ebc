"""A program that cannot start ends the job, and a host that is told to end lets all ranks save together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.repository import REPO
from tests.unit.steering.checked_events import arrive, connect, members, run, started
from tests.unit.steering.peers import until
from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.base.round_folder import RINGS, RINGS_JOB, Failed, note_failure, read_failure, remove_note
from unickpt.steering.host.workers import EndedWorkers
from unickpt.steering.state.membership import (
    Arrived,
    Committed,
    JobPhase,
    Leaving,
    Left,
    Membership,
    WorkerFailed,
    exit_code,
    must_stop,
)
from unickpt.steering.wire.codec import event_as_json, event_from_json, state_as_json, state_from_json
from unickpt.testing.launch import environment

ERROR = "rank 0: ModuleNotFoundError: No module named 'x' (train.py:3)"


def epoch_of(state: Membership) -> tuple[int, int]:
    assert state.round is not None
    return state.round.epoch


def fail(state: Membership, *signatures: str) -> Membership:
    """Let all hosts fail, the first with these errors, and begin the next round."""
    epoch = epoch_of(state)
    state = run(state, *(WorkerFailed("h1", "1", epoch, signature, ERROR, "restart") for signature in signatures))
    state = run(state, *(Arrived(name, "1", epoch) for name in ("h1", "h2")))
    return state if state.closed else connect(state)


def job(retries: int | None = 3) -> Membership:
    state = started(2, 2, 2)
    return replace(state, limits=replace(state.limits, retries=retries))


def test_the_same_error_in_three_rounds_ends_the_job_with_it() -> None:
    state = fail(fail(job(), "ModuleNotFoundError train.py:3"), "ModuleNotFoundError train.py:3", "other")
    assert not state.closed
    assert state_from_json(json.loads(json.dumps(state_as_json(state, 0.0))), 0.0).stillborn == state.stillborn
    state = fail(state, "ModuleNotFoundError train.py:3")
    assert ERROR in state.closed
    assert must_stop(state, epoch_of(state))
    assert not state.finished


def test_other_errors_and_progress_begin_a_new_count() -> None:
    state = fail(fail(fail(fail(job(), "a"), "a"), "b"), "a")
    assert not state.closed
    state = run(state, Committed("h1", "1", epoch_of(state), 1))
    assert not fail(fail(state, "a"), "a").closed, "a round that has committed a checkpoint can start"
    without = job(retries=None)
    for _ in range(5):
        without = fail(without, "a")
    assert not without.closed, "act=false"
    assert fail(fail(job(retries=1), "a"), "a").closed


def with_failure(remedy: str, *, reached: int = 0, hosts: int = 2, retries: int | None = 3) -> Membership:
    """Return the job after the failure of a worker on h1 in its first round, at a step."""
    state = replace(started(hosts, 1, hosts), reached=reached)
    state = replace(state, limits=replace(state.limits, retries=retries))
    return run(state, WorkerFailed("h1", "1", epoch_of(state), "KeyError a.py:1", "rank 0: KeyError: 'x' (a.py:1)", remedy))


@pytest.mark.parametrize("reached", [0, 500])
def test_an_error_that_a_restart_meets_again_ends_the_job_at_once(reached: int) -> None:
    closed = with_failure("stop", reached=reached).closed
    assert "a restart meets the same error: on h1: rank 0: KeyError: 'x' (a.py:1)" in closed
    assert not with_failure("restart", reached=reached).closed
    assert not with_failure("stop", reached=reached, retries=None).closed, "act=false"


def test_a_host_whose_device_fails_is_out_unless_it_is_needed() -> None:
    state = with_failure("evict")
    assert not state.closed
    assert list(state.parked) == ["h1"]
    assert state.parked["h1"].reason == "rank 0: KeyError: 'x' (a.py:1)"
    alone = with_failure("evict", hosts=1)
    assert (alone.parked, alone.closed) == ({}, "")


def test_nobody_begins_a_round_before_a_host_that_is_told_to_end_has_left() -> None:
    state = job()
    state = replace(state, limits=replace(state.limits, min_nodes=1))
    epoch = epoch_of(state)
    state = run(state, Leaving("h2", "1", "SIGTERM"))
    assert (state.phase, state.reason) == (JobPhase.GATHERING, "h2 is told to end (SIGTERM)")
    assert must_stop(state, epoch), "the workers of h1 are asked to end at the same time"
    state = run(state, Arrived("h1", "1", epoch), Leaving("h2", "1", "SIGTERM"))
    assert state.phase is JobPhase.GATHERING
    state = run(state, Left("h2", "1"))
    assert (state.phase, members(state)) == (JobPhase.OPENING, ["h1"])
    for event in (Leaving("h2", "1", "SIGTERM"), WorkerFailed("h1", "1", (1, 1), "a", ERROR, "stop")):
        assert event_from_json(event_as_json(event)) == event


def test_a_spare_that_is_told_to_end_changes_nothing_for_the_others() -> None:
    state = arrive(started(2, 1, 2), "h3")
    assert run(state, Leaving("h3", "1", "SIGTERM")).phase is JobPhase.RUNNING


PROGRAM = """
import os, signal, sys
import torch
if sys.argv[1] == "steps":
    weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    torch.optim.SGD([weight], 0.1).step()
if sys.argv[1] == "peer": raise ConnectionResetError("the other rank has ended")
import no_such_module
"""


@pytest.mark.parametrize(
    ("how", "excused"), [("fails", False), ("steps", True), ("peer", True)], ids=["before a step", "after a step", "of a peer"]
)
def test_a_worker_notes_its_exception(tmp_path: Path, how: str, excused: bool) -> None:
    variables = {RINGS: str(tmp_path), RINGS_JOB: "id", "TORCHELASTIC_RUN_ID": "id", "RANK": "3", "UNICKPT_AGENT": "x"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=environment(REPO) | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(("No module named 'no_such_module'", "the other rank has ended")), done.stderr
    found = read_failure(tmp_path, 3)
    assert found is not None
    assert found.excused is excused
    if how == "fails":
        assert found.signature == "ModuleNotFoundError <string>:8"
        assert "No module named 'no_such_module'" in found.text
    remove_note(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_agent_says_why_its_first_worker_has_failed(tmp_path: Path) -> None:
    def ended(*programs: str, noted: Failed | None = None) -> Failed | None:
        watch = EndedWorkers((b"OF=test",), tmp_path, frozenset, lambda _: None)
        started_ = [
            subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; {program}"], env={"OF": "test", "RANK": str(rank)})
            for rank, program in enumerate(programs)
        ]
        try:
            until(lambda: len(watch._ranks) == len(programs))
            if noted is not None:
                note_failure(tmp_path, 0, noted)
            for process in started_:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            until(lambda: len(watch._exits.known) == len(programs))
            return watch.failure()
        finally:
            watch.close()
            for process in started_:
                process.wait()
            remove_note(tmp_path)

    found = ended("exit 0", "sleep 0.2; exit 7")
    assert found is not None
    assert (found.signature, found.text.split(" within")[0]) == ("exit code 7", "rank 1: ended with exit code 7")
    assert ended("kill -9 $$") is None, "a signal is no fault of the program"
    assert ended("exit 1", noted=Failed("ValueError a.py:1", "ValueError: x (a.py:1)", True)) is None
    found = ended("exit 1", noted=Failed("ValueError a.py:1", "ValueError: x (a.py:1)", False))
    assert found == Failed("ValueError a.py:1", "rank 0: ValueError: x (a.py:1)", False)
    late = Failed("KeyError a.py:1", "KeyError: 'x' (a.py:1)", True, FailureKind.PROGRAM, Remedy.STOP)
    assert ended("exit 1", noted=late) == replace(late, text="rank 0: KeyError: 'x' (a.py:1)")
    assert ended("exit 1", noted=replace(late, kind=FailureKind.CONNECTION, remedy=Remedy.RESTART, excused=False)) is None


def test_workers_that_were_told_to_end_are_no_error(tmp_path: Path) -> None:
    def told(*programs: str) -> bool:
        watch = EndedWorkers((b"OF=test",), tmp_path, frozenset, lambda _: None)
        workers = [
            subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; {program}"], env={"OF": "test", "RANK": str(rank)})
            for rank, program in enumerate(programs)
        ]
        try:
            assert not watch.told_to_end(), "nobody has ended"
            until(lambda: len(watch._ranks) == len(programs))
            for process in workers:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            until(lambda: len(watch._exits.known) == len(programs))
            return watch.told_to_end()
        finally:
            watch.close()
            for process in workers:
                process.wait()
            remove_note(tmp_path)

    assert told("exit 143", "sleep 0.3; exit 1"), "the first end counts"
    assert told("kill -TERM $$")
    assert not told("exit 1", "sleep 0.3; exit 143")
    assert not told("kill -KILL $$")


def test_the_exit_code_of_an_agent_that_comes_to_a_closed_job() -> None:
    state = replace(job(), closed="the program has finished on h1", finished=True)
    epoch = epoch_of(state)
    assert exit_code(state, epoch, told=False) == 1, "its workers have failed in the last round"
    assert exit_code(state, epoch, told=True) == 143
    assert exit_code(state, (0, 0), told=False) == 0, "a spare"
    assert exit_code(replace(state, finished=False), (0, 0), told=False) == 1
    assert exit_code(replace(state, finished=False), epoch, told=True) == 143


TOLD = """
import signal, sys, time
from unickpt.steering.agent.end_signal import EndSignal
signal.signal(signal.SIGTERM, lambda *_: time.sleep(1.0))
EndSignal(lambda name: print(name, flush=True))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_signal_is_told_while_the_main_thread_is_busy() -> None:
    process = subprocess.Popen([sys.executable, "-c", TOLD], env=environment(REPO), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.kill()
    process.wait()
