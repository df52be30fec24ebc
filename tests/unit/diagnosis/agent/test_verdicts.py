"""What an agent tells of a job: who is stopped, out of step, dead, or merely writes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import S, call, hung, made_up, ring
from unickpt.base.private_files import append
from unickpt.diagnosis.agent.step_history import StepHistory
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.p2p_links import transfers_of
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.diagnosis.host.process_exits import EXITS, ExitStatus, ExitWatcher, ProcessExit, append_exits, read_exits
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Flag, Op, Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.verdict_text import render, render_all
from unickpt.diagnosis.snapshot.snapshot import CALL, Snapshot, kept_steps, take_snapshot
from unickpt.diagnosis.snapshot.steps import STEP


def test_a_rank_that_is_stopped_inside_of_a_call_is_named(tmp_path: Path) -> None:
    hung(tmp_path, culprit=-1)
    snapshot = take_snapshot(read_folder(tmp_path))
    assert [v.syndrome for v in examine(snapshot, after_s=5).verdicts] == [Syndrome.COMMUNICATION_HANG]
    ranks = {
        rank: dataclasses.replace(one, state=State.STOPPED if rank == 3 else one.state) for rank, one in snapshot.ranks.items()
    }
    (verdict,) = examine(dataclasses.replace(snapshot, ranks=ranks), after_s=5).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.NON_COMMUNICATION_HANG, (3,), 3)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_call_whose_last_member_has_just_come_does_not_hang(tmp_path: Path, goes_on: bool) -> None:
    """Rank 2 was away for 30 s, as rank 0 that uploads alone. It gets through the call a moment before the others."""
    hung(tmp_path, culprit=-1)
    now = time.monotonic_ns()
    late = ring(tmp_path, 2)
    for number in (1, 2):
        call(late, number, now - 40 * S, now - 39 * S)
    call(late, 3, now - S // 10, now - S // 20)
    if goes_on:
        call(late, 4, now - S // 50, 0)
    late.state(heartbeat_ns=now, step=20, newest=3 + goes_on, phase=int(Phase.BACKWARD))
    snapshot = take_snapshot(read_folder(tmp_path))
    assert examine(snapshot, after_s=5).verdicts == []
    later = dataclasses.replace(snapshot, now_ns=snapshot.now_ns + 6 * S)  # but now it does
    (verdict,) = examine(later, after_s=5).verdicts
    assert verdict.syndrome is Syndrome.COMMUNICATION_HANG
    assert snapshot.now_ns - verdict.since_ns < S


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_passed_a_call_with_another_shape_is_named(tmp_path: Path, goes_on: bool) -> None:
    """Gloo lets one pass whose tensor is smaller; the others stay in the call, and it waits in the next one."""
    hung(tmp_path, culprit=-1)
    now = time.monotonic_ns()
    odd = ring(tmp_path, 2)
    for number in (1, 2):
        call(odd, number, now - 40 * S, now - 39 * S)
    odd.put(3, now - 30 * S, 0, now - 30 * S, now - 29 * S, 3, 5, 5, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 8)
    if goes_on:
        call(odd, 4, now - 29 * S, 0)
    odd.state(heartbeat_ns=now, step=20, newest=3 + goes_on, phase=int(Phase.BACKWARD))
    (verdict,) = examine(take_snapshot(read_folder(tmp_path)), after_s=5).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (2,), 3)


@pytest.mark.parametrize("at", ["waits", "has begun", "has begun two", "begins"])
def test_a_rank_that_gloo_aborts_because_of_another_shape_is_not_at_fault(tmp_path: Path, at: str) -> None:
    """Gloo aborts a process that gets more bytes than it has room for, perhaps before it waits in the call or records it."""
    hung(tmp_path, culprit=-1, since_s=0.2)
    now = time.monotonic_ns()
    odd, aborted = ring(tmp_path, 2), ring(tmp_path, 0)
    for each in (odd, aborted):
        for number in (1, 2):
            call(each, number, now - 40 * S, now - 39 * S)
    odd.put(3, now - S // 5, 0, now - S // 5, 0, 3, 5, 5, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 8)
    if at == "waits":
        call(aborted, 3, now - S // 5, 0)
    elif at != "begins":
        for number in range(3, 5 if at.endswith("two") else 4):
            aborted.put(number, now - S // 5, 0, 0, 0, number, 9, 9, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 7)
    for each, newest in ((odd, 3), (aborted, {"begins": 2, "has begun two": 4}.get(at, 3))):
        each.state(heartbeat_ns=now, step=20, newest=newest, phase=int(Phase.BACKWARD))
    snapshot = dead(take_snapshot(read_folder(tmp_path)), {0: 6.0}, {0: "SIGABRT"})
    (verdict,) = examine(snapshot, after_s=60).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (2,), 3)


def test_a_rank_is_aborted_in_a_call_behind_the_one_in_which_all_wait(tmp_path: Path) -> None:
    """All ranks have begun two calls and wait in the first; the second has another size on rank 2."""
    hung(tmp_path, culprit=-1, since_s=0.2)
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(tmp_path, rank)
        for number in (1, 2):
            call(made, number, now - 40 * S, now - 39 * S)
        call(made, 3, now - S // 5, 0)
        size, shape = (5, 8) if rank == 2 else (9, 7)
        made.put(4, now - S // 5, 0, 0, 0, 4, size, size, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, shape)
        made.put(3, now - S // 5, 0, now - S // 6, 0, 3, 8, 8, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 7)
        made.state(heartbeat_ns=now, step=20, newest=4, phase=int(Phase.BACKWARD))
    snapshot = dead(take_snapshot(read_folder(tmp_path)), {0: 6.0}, {0: "SIGABRT"})
    (verdict,) = examine(snapshot, after_s=60).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (2,), 4)


@pytest.mark.parametrize(
    ("signal", "elements"), [("SIGKILL", 5), ("SIGABRT", 8)], ids=["killed", "shapes of as many elements, which are legal"]
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_rank_that_dies_of_something_else_is_at_fault_whatever_the_others_call(
    tmp_path: Path, signal: str, elements: int, begun: bool
) -> None:
    """DeepSpeed's pipeline sends a scalar of shape ``()`` to ranks that receive it as ``(1,)``."""
    hung(tmp_path, culprit=0, since_s=0.2)
    now, odd = time.monotonic_ns(), ring(tmp_path, 2)
    for number in (1, 2):
        call(odd, number, now - 40 * S, now - 39 * S)
    odd.put(3, now - S // 5, 0, now - S // 5, 0, 3, elements, elements, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 8)
    odd.state(heartbeat_ns=now, step=20, newest=3, phase=int(Phase.BACKWARD))
    if begun:
        dies = ring(tmp_path, 0)
        for number in (1, 2):
            call(dies, number, now - 40 * S, now - 39 * S)
        dies.put(3, now - S // 5, 0, 0, 0, 3, 8, 8, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 7)
        dies.state(heartbeat_ns=now, step=20, newest=3, phase=int(Phase.BACKWARD))
    snapshot = dead(take_snapshot(read_folder(tmp_path)), {0: 6.0}, {0: signal})
    (verdict,) = examine(snapshot, after_s=60).verdicts
    assert verdict.ranks == (0,)


STATUS = {
    "": None, "SIGKILL": ExitStatus(9), "SIGTERM": ExitStatus(15), "SIGSEGV": ExitStatus(11),
    "SIGABRT": ExitStatus(6),
    "exit code 0": ExitStatus(), "exit code 1": ExitStatus(code=1), "exit code 3": ExitStatus(code=3),
}  # fmt: skip


def dead(snapshot: Snapshot, heard_s: dict[int, float], ended: dict[int, str] | None = None) -> Snapshot:
    status = {rank: STATUS[text] for rank, text in (ended or {}).items()}
    ranks = {
        rank: dataclasses.replace(one, state=State.DEAD, heard_ns=int(heard_s[rank] * S), exit=status.get(rank))
        if rank in heard_s
        else one
        for rank, one in snapshot.ranks.items()
    }
    return dataclasses.replace(snapshot, ranks=ranks)


@pytest.mark.parametrize(
    ("heard_s", "named"),
    [
        ({2: 5.0}, [(2,)]),  # the others live
        ({0: 6.0, 1: 6.1, 2: 5.0, 3: 6.2}, [(2,)]),  # they have died of it
        ({0: 6.0, 1: 6.01, 2: 6.02, 3: 6.03}, []),  # somebody has ended the job
        ({0: 6.08, 1: 6.09, 2: 6.0, 3: 6.09}, []),  # and rank 2 was looked at first
    ],
)
def test_a_dead_rank_is_reported_before_the_deadline(tmp_path: Path, heard_s: dict[int, float], named: list[Any]) -> None:
    hung(tmp_path, culprit=2, since_s=0.2)
    snapshot = dead(take_snapshot(read_folder(tmp_path)), heard_s)
    assert [verdict.ranks for verdict in examine(snapshot, after_s=60).verdicts] == named


def test_a_rank_whose_call_failed_died_of_another_one(tmp_path: Path) -> None:
    """Rank 2 is killed. Rank 0 loses the connection to it in the call before, and ends first as far as the clocks tell."""
    hung(tmp_path, culprit=2, since_s=0.2)
    now, odd = time.monotonic_ns(), ring(tmp_path, 0)
    call(odd, 1, now - 40 * S, now - 39 * S)
    call(odd, 2, now - 30 * S, 0)
    odd.flag(2, int(Flag.FAILED))
    odd.state(heartbeat_ns=now, step=20, newest=2, phase=int(Phase.BACKWARD))
    (verdict,) = examine(dead(take_snapshot(read_folder(tmp_path)), {0: 5.0, 2: 5.01}), after_s=60).verdicts
    assert verdict.ranks == (2,)


@pytest.mark.parametrize(
    ("heard_s", "ended", "named"),
    [
        ({2: 6.0, 0: 6.03, 1: 6.04, 3: 6.04}, {2: "SIGKILL", 0: "SIGTERM", 1: "SIGTERM", 3: "SIGTERM"}, [(2,)]),  # the launcher
        (
            {2: 6.0, 0: 6.03, 1: 6.04, 3: 6.04},
            {2: "SIGKILL", 0: "exit code 1", 1: "SIGTERM", 3: "SIGTERM"},
            [(2,)],
        ),  # died of it
        ({2: 6.0, 0: 6.0, 1: 6.001, 3: 6.002}, dict.fromkeys(range(4), "SIGTERM"), []),  # somebody has ended the job
        ({2: 6.0, 0: 6.0, 1: 6.001, 3: 6.002}, dict.fromkeys(range(4), "SIGKILL"), []),
        ({2: 6.0}, {2: "SIGTERM"}, [(2,)]),  # the others live
    ],
)
def test_a_terminated_rank_is_not_the_first_death(
    tmp_path: Path, heard_s: dict[int, float], ended: dict[int, str], named: list[Any]
) -> None:
    hung(tmp_path, culprit=2, since_s=0.2)
    snapshot = dead(take_snapshot(read_folder(tmp_path)), heard_s, ended)
    found = examine(snapshot, after_s=60)
    assert [verdict.ranks for verdict in found.verdicts] == named
    assert all(f"is dead ({ended[2]})" in text.sentence for text in render_all(found.verdicts, snapshot))


@pytest.mark.parametrize(
    ("heard_s", "ended", "failed", "named"),
    [
        ({2: 6.0, 3: 6.13}, {2: "exit code 1", 3: "SIGTERM"}, set(), [(2,)]),  # the launcher has begun to end the others
        ({2: 6.0, 0: 6.02, 1: 6.03, 3: 6.04}, dict.fromkeys(range(4), "exit code 1"), {0, 1, 3}, [(2,)]),  # they died of it
        ({2: 6.0, 0: 6.02, 1: 6.03, 3: 6.04}, dict.fromkeys(range(4), "exit code 1"), set(range(4)), []),  # of something else
        ({2: 6.0, 0: 6.02, 1: 6.03, 3: 6.04}, dict.fromkeys(range(4), "exit code 0"), set(), []),
    ],
)
def test_a_rank_that_raised_an_exception_is_named(
    tmp_path: Path, heard_s: dict[int, float], ended: dict[int, str], failed: set[int], named: list[Any]
) -> None:
    """Python ends such a process in order, so its ring is closed."""
    hung(tmp_path, culprit=2, since_s=0.2)
    snapshot = dead(take_snapshot(read_folder(tmp_path)), heard_s, ended)
    ranks = {
        rank: dataclasses.replace(one, closed=ended.get(rank, "").startswith("exit"), failed=rank in failed)
        for rank, one in snapshot.ranks.items()
    }
    found = examine(dataclasses.replace(snapshot, ranks=ranks), after_s=60)
    assert [verdict.ranks for verdict in found.verdicts] == named


@pytest.mark.parametrize(("ended", "named"), [("SIGSEGV", [(1,)]), ("exit code 1", [(1,)]), ("exit code 0", []), ("", [])])
def test_a_death_is_reported_before_any_rank_waits(tmp_path: Path, ended: str, named: list[Any]) -> None:
    hung(tmp_path, culprit=-1, since_s=0.2)
    for rank in range(4):  # nobody is in any call
        call(ring(tmp_path, rank), 1, time.monotonic_ns() - S, time.monotonic_ns() - S // 2)
    snapshot = dead(take_snapshot(read_folder(tmp_path)), {1: 6.0}, {1: ended})
    found = examine(snapshot, after_s=60)
    assert [verdict.ranks for verdict in found.verdicts] == named
    assert all(text.sentence.startswith(f"rank 1 has ended ({ended}) since ") for text in render_all(found.verdicts, snapshot))


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(("how", "ending"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM"), (None, "exit code 3")])
def test_how_a_process_ended_is_seen_at_once(how: signal.Signals | None, ending: str, reaped: bool) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        exits = ExitWatcher()
        exits.watch([process.pid, os.getpid()])
        parent = threading.Thread(target=process.wait)
        if reaped:
            parent.start()
        begin = time.monotonic_ns()
        assert process.stdin is not None
        process.stdin.close() if how is None else process.send_signal(how)
        exits.sleep(60)
        now = time.monotonic_ns()
        assert begin < exits.known[process.pid].at_ns < now < begin + 30 * S
        # before Linux 6.15, the status of a reaped process is unknown
        assert exits.known[process.pid].status in ((STATUS[ending], None) if reaped else (STATUS[ending],))
        assert os.getpid() not in exits.known
        exits.close()


def test_who_ended_first_is_known_after_the_job_has_ended(tmp_path: Path) -> None:
    """Rank 0 was ended by the launcher before it came to the call in which the others wait: the rings alone accuse it."""
    hung(tmp_path, culprit=2, since_s=8)
    call(ring(tmp_path, 0), 1, time.monotonic_ns() - 9 * S, time.monotonic_ns() - 9 * S + S // 2)
    job = read_folder(tmp_path)
    rings = {
        rank: dataclasses.replace(each, identity=dataclasses.replace(each.identity, pid=1000 + rank))
        for rank, each in job.ranks.items()
    }
    ended = dataclasses.replace(job, ranks=rings, states=dict.fromkeys(rings, State.DEAD))
    found = examine(take_snapshot(ended, exits=read_exits(tmp_path)), after_s=5).verdicts
    assert [verdict.ranks for verdict in found] == [(0,)]  # whose last sign of life is the oldest
    now = time.monotonic_ns()
    append_exits(tmp_path, {1002: ProcessExit(now, ExitStatus(9)), 1001: ProcessExit(now + S // 25, None)})
    append_exits(tmp_path, {1000 + rank: ProcessExit(now + S // 20, ExitStatus(15)) for rank in (0, 3)})
    append(tmp_path / EXITS, b'no line\n[]\n{"pid": 1002}\n' + b"[" * 100_000)
    snapshot = take_snapshot(ended, exits=read_exits(tmp_path))
    (verdict,) = examine(snapshot, after_s=5).verdicts
    assert verdict.ranks == (2,)
    assert "is dead (SIGKILL)" in render(verdict, snapshot).sentence
    before = {pid: dataclasses.replace(end, at_ns=1) for pid, end in read_exits(tmp_path).items()}
    assert all(one.exit is None for one in take_snapshot(ended, exits=before).ranks.values())  # numbers that were used again


@pytest.mark.parametrize(
    ("phase", "count"), [(Phase.CHECKPOINT, 0), (Phase.EVALUATION, 0), (Phase.FORWARD, 1), (Phase.DATA, 1)]
)
def test_a_rank_that_saves_is_not_reported(tmp_path: Path, phase: Phase, count: int) -> None:
    hung(tmp_path, phase=phase, since_s=130)  # 120 s are allowed where no steps are known
    snapshot = take_snapshot(read_folder(tmp_path))
    found = examine(snapshot)
    assert len(found.verdicts) == count
    if phase is Phase.DATA:
        assert "waiting for data" in render(found.verdicts[0], snapshot).sentence


def test_a_verdict_has_coordinates(tmp_path: Path) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    (text,) = render_all(examine(snapshot, after_s=5).verdicts, snapshot)
    assert "(dp 2)" in text.sentence


def test_setting_the_wall_clock_does_not_change_the_age_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung(tmp_path, since_s=1)
    later = time.time_ns() + 3600 * S
    monkeypatch.setattr("unickpt.diagnosis.recording.ring_folder.time.time_ns", lambda: later)
    assert examine(take_snapshot(read_folder(tmp_path)), after_s=5).verdicts == []


def test_transfers_begin_when_both_ranks_have_entered() -> None:
    calls = np.zeros(4, CALL)
    calls["rank"], calls["op"] = [0, 1, 0, 1], [int(Op.SEND), int(Op.RECEIVE)] * 2
    calls["source"], calls["destination"], calls["seq"], calls["bytes"] = 0, 1, [1, 1, 2, 2], 64
    calls["call_ns"], calls["end_ns"] = [100, 50, 200, 900], [0, 130, 0, 925]
    assert transfers_of(calls)["ns"].tolist() == [30.0, 25.0]
    calls["wait_ns"] = [0, 125, 0, 700]
    assert transfers_of(calls)["ns"].tolist() == [25.0]  # the first may have been there for long when somebody looked


def test_a_hang_does_not_lengthen_the_deadline() -> None:
    memory = StepHistory()
    empty = made_up([])
    memory.deadline_s = 5.0
    assert memory.with_more(dataclasses.replace(empty, longest_wait_ns=2 * S)).longest_wait_ns == 2 * S
    assert memory.with_more(dataclasses.replace(empty, longest_wait_ns=60 * S)).longest_wait_ns == 2 * S


def test_steps_are_remembered_beyond_one_look() -> None:
    memory, empty = StepHistory(), made_up([])
    for first in (1, 3, 20, 40):
        steps = np.zeros(4, STEP)
        steps["number"] = np.arange(first, first + 4)
        seen = memory.with_more(dataclasses.replace(empty, steps=steps)).steps["number"].tolist()
    assert seen == [1, 2, 3, 4, 5, 6, 20, 21, 22, 23, 40, 41, 42, 43]


def test_many_ranks_share_the_steps_that_are_remembered() -> None:
    assert [kept_steps(ranks) for ranks in (1, 256, 512, 4096, 5000, 8192, 1 << 20)] == [256, 256, 128, 64, 52, 32, 32]
