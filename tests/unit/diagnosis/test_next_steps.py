"""What a verdict tells a person to do: the hint as a value, its sentence, and the command."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import S, call, hung, made_up, ring
from unickpt.diagnosis.detectors.call_order import CallOrder
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hints import CollectTogether, LooksAtNetwork, LooksAtProcess, Matter, OffTrack
from unickpt.diagnosis.detectors.observations import CallRef, CircularWait
from unickpt.diagnosis.detectors.places import ranks_at, with_places
from unickpt.diagnosis.detectors.verdicts import Cause, Reach, Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.next_text import command_of, next_text
from unickpt.diagnosis.reports.verdict_text import render
from unickpt.diagnosis.snapshot.snapshot import GroupInfo, Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.steps import STEP

RINGS, STEERED = Reach(("/dev/shm/unickpt-0-a b",)), Reach(("/dev/shm/r",), steered=True)
GROUP = GroupInfo("g", "data parallel", ((0, 1, 4),))


def seen(folder: Path, **of_rank_2: Any) -> Snapshot:
    """A job whose ranks wait for rank 2, on host ``node02``, in a state."""
    hung(folder)
    job = take_snapshot(read_folder(folder))
    changed = dataclasses.replace(job.ranks[2], host="node02", pid=77, **of_rank_2)
    return dataclasses.replace(job, ranks={**job.ranks, 2: changed})


@pytest.mark.parametrize(
    ("state", "matter", "command"),
    [
        ({"state": State.STOPPED}, Matter.STOPPED, "kill -CONT 77"),
        ({"state": State.DEAD, "exit": ExitStatus(9)}, Matter.KILLED, "dmesg -T"),
        ({"state": State.DEAD, "exit": ExitStatus(0, 1)}, Matter.FAILED, ""),
        ({"state": State.STUCK}, Matter.STUCK, "dmesg -T"),
        ({"state": State.RUNNING}, Matter.BUSY, "py-spy dump --pid 77"),
        ({"state": State.SLEEPING}, Matter.BUSY, "py-spy dump --pid 77"),
    ],
)
def test_each_state_of_a_process_has_its_hint_and_command(
    tmp_path: Path, state: dict[str, Any], matter: Matter, command: str
) -> None:
    job = seen(tmp_path, **state)
    (verdict,) = examine(job, after_s=5, reach=RINGS).verdicts
    assert verdict.next == LooksAtProcess(2, 77, "node02", matter)
    assert verdict.hosts == ("node02",)
    text = render(verdict, job)
    assert "host=node02" in text.line
    assert text.command.startswith(command)
    assert text.next.endswith(f"type on node02: {text.command}" if command else "log of node02")
    assert verdict.as_json()["hosts"] == ["node02"]


def test_under_steering_the_command_takes_the_host_out(tmp_path: Path) -> None:
    job = seen(tmp_path)
    (verdict,) = examine(job, after_s=5, reach=STEERED).verdicts
    stack = (Frame("read", "socket.py", 700), Frame("lookup", "data/vocabulary.py", 33, own=True))
    job = dataclasses.replace(job, ranks={**job.ranks, 2: dataclasses.replace(job.ranks[2], stack=stack)})
    placed = with_places(verdict, job)
    assert command_of(placed) == "unickpt hosts park node02"
    assert "look at what it does at data/vocabulary.py:33 (lookup)" in next_text(placed)


def test_a_rank_that_waits_has_a_place_only_in_the_users_own_code(tmp_path: Path) -> None:
    """A line of the library, such as one that prints a traceback, is no place to look at."""
    hung(tmp_path)
    job = take_snapshot(read_folder(tmp_path))
    own = (Frame("read", "socket.py", 7), Frame("train", "run.py", 3, own=True))
    stacks = ((Frame("updatecache", "linecache.py", 137),), own)
    ranks = {rank: dataclasses.replace(job.ranks[rank], stack=stacks[rank]) for rank in (0, 1)}
    job = dataclasses.replace(job, ranks={**job.ranks, **ranks})
    assert [(each.at.function, each.ranks) for each in ranks_at((0, 1), job, waiting=True)] == [("train", (1,))]
    assert [each.at.function for each in ranks_at((0, 1), job, waiting=False)] == ["updatecache", "train"]


@pytest.mark.parametrize(
    ("verdict", "command"),
    [
        (Verdict(Syndrome.COMMUNICATION_HANG, (0, 4), 1, hosts=("a", "b"), next=LooksAtNetwork(("a", "b"))), "ping -c 5 b"),
        (
            Verdict(
                Syndrome.COMMUNICATION_SLOW, (3, 7), 1, link=(3, 7), hosts=("a", "b"),
                next=LooksAtNetwork(("a", "b"), (3, 7), slow=True),
            ),
            "unickpt whatif '/dev/shm/unickpt-0-a b' --link 3-7",
        ),
        (
            Verdict(Syndrome.NON_COMMUNICATION_SLOW, (2,), 1, next=LooksAtProcess(2, 77, "b", Matter.SLOW)),
            "unickpt whatif '/dev/shm/unickpt-0-a b' --without-rank 2",
        ),
        (
            Verdict(Syndrome.NON_COMMUNICATION_SLOW, (0, 1), 1, cause=Cause.GARBAGE, next=CollectTogether((0, 1))),
            "unickpt whatif '/dev/shm/unickpt-0-a b'",
        ),
    ],
)  # fmt: skip
def test_commands_name_the_records_of_the_job(verdict: Verdict, command: str) -> None:
    assert command_of(dataclasses.replace(verdict, reach=RINGS)) == command
    assert next_text(dataclasses.replace(verdict, reach=RINGS)).endswith(command)
    assert next_text(verdict)  # also where they are not known


def test_no_verdict_is_without_a_hint_and_a_meaning(tmp_path: Path) -> None:
    hung(tmp_path, culprit=-1)
    job = take_snapshot(read_folder(tmp_path))
    (verdict,) = examine(job, after_s=5).verdicts
    assert isinstance(verdict.next, LooksAtNetwork)
    said = render(verdict, job).sentence
    assert said.startswith("communication hang (a call that all members have entered and that does not end): ")
    assert all(syndrome.meaning for syndrome in Syndrome)


def test_calls_that_a_rank_has_made_fewer_are_counted() -> None:
    """Ranks make one call in each step of 10 ns. Rank 1 leaves one out in step 5. Of step 1, the begin is lost."""
    calls = [(rank, seq, 10 * seq + 3, 10 * seq + 4) for seq in range(1, 8) for rank in (0, 1) if (rank, seq) != (1, 5)]
    job = made_up(calls)
    steps = np.zeros(14, STEP)
    steps["rank"], steps["number"] = np.repeat([0, 1], 7), np.tile(np.arange(1, 8), 2)
    steps["begin_ns"] = 10 * steps["number"]
    found = CallOrder(job.calls).made(1, 0, 0, Op.ALL_REDUCE, steps)
    assert found is not None
    assert (found.made, found.of, found.since_step) == (5, 6, 2)
    assert CallOrder(job.calls).made(1, 0, 0, Op.ALL_REDUCE, steps[:7]) is None  # no step of rank 1 is known
    usual = CallRef(Op.ALL_REDUCE, 6, GROUP)
    hint = OffTrack((1,), CallRef(Op.BARRIER, 2, GROUP), (0, 2, 3), usual, 1, True, 41, 42, 7)
    said = next_text(Verdict(Syndrome.DEADLOCK, (1,), 1, next=hint))
    assert said.endswith("rank 1 has made one all_reduce fewer: 41 of 42 since step 7")


def test_the_hint_of_a_rank_that_left_out_a_call_has_the_counts(tmp_path: Path) -> None:
    """Ranks make all_reduce, barrier, ... in turn. Rank 2 leaves out the last all_reduce, and waits in the barrier."""
    now = time.monotonic_ns()
    for rank in range(4):
        made, number = ring(tmp_path, rank), 0
        for step in range(8):
            for op in (Op.ALL_REDUCE, Op.BARRIER):
                if (rank, step, op) == (2, 7, Op.ALL_REDUCE):
                    continue
                if rank != 2 and (step, op) == (7, Op.BARRIER):
                    continue
                number += 1
                begin = now - (20 - step) * S + (op is Op.BARRIER) * S // 2
                call(made, number, begin, 0 if step == 7 else begin + S // 10, op=op)
        made.state(heartbeat_ns=now, step=8, newest=number, phase=int(Phase.BACKWARD))
    job = take_snapshot(read_folder(tmp_path))
    steps = np.zeros(32, STEP)
    steps["rank"], steps["number"] = np.repeat(np.arange(4), 8), np.tile(np.arange(8), 4)
    steps["begin_ns"] = job.now_ns - (20 - steps["number"].astype(np.int64)) * S - S // 10
    (verdict,) = examine(dataclasses.replace(job, steps=steps), after_s=5).verdicts
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.MISMATCH, (2,))
    assert isinstance(verdict.next, OffTrack)
    assert (verdict.next.left_out, verdict.next.made, verdict.next.of) == (1, 6, 7)


def test_a_call_that_its_group_has_not_made_before_is_one_too_many() -> None:
    """The others have then made one more of theirs, which does not mean that this rank has left one out."""
    order = CallOrder(made_up([(rank, seq, 10 * seq, 10 * seq + 4) for seq in range(1, 8) for rank in (0, 1)]).calls)
    assert order.is_new(0, Op.BARRIER, 8)
    assert not order.is_new(0, Op.ALL_REDUCE, 8)
    assert order.is_new(0, Op.ALL_REDUCE, 1)
    assert order.is_new(1, Op.ALL_REDUCE, 8)
    usual = CallRef(Op.ALL_REDUCE, 8, GROUP)
    hint = OffTrack((0,), CallRef(Op.BARRIER, 8, GROUP), (1, 2, 3), usual, 1, True, 41, 42, 7, alone=True)
    said = next_text(Verdict(Syndrome.MISMATCH, (0,), 1, next=hint))
    assert said.endswith(
        "rank 0 makes a call that this group has not made before: let every rank of the group make it, or none. If all ranks "
        "come to this call later, rank 0 has made one all_reduce fewer: 41 of 42 since step 7"
    )


def test_two_sends_that_meet_are_said_once_each() -> None:
    sends = [CallRef(Op.SEND, 1, GROUP, pair) for pair in ((0, 1), (1, 0))]
    waits = (CircularWait(sends[0], (0,), (1,), sends[1]), CircularWait(sends[1], (1,), (0,), sends[0]))
    said = render(Verdict(Syndrome.DEADLOCK, (0, 1), 1, evidence=waits), made_up([])).sentence
    assert said.count("send #1") == 2
    assert "rank waits" not in said
    assert "ranks wait" not in said.replace("ranks wait for each other", "")


def test_a_rank_that_was_killed_in_the_call_of_the_others_has_ended(tmp_path: Path) -> None:
    """Nobody says of it that it has not entered the call."""
    hung(tmp_path, culprit=-1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    now, killed = time.monotonic_ns(), ring(tmp_path, 2, pid=ended.pid)
    for number in (1, 2):
        call(killed, number, now - 40 * S, now - 39 * S)
    call(killed, 3, now - 30 * S, 0)
    killed.state(heartbeat_ns=now, step=20, newest=3, phase=int(Phase.BACKWARD))
    job = take_snapshot(read_folder(tmp_path))
    (verdict,) = examine(job, after_s=5).verdicts
    assert verdict.ranks == (2,)
    assert render(verdict, job).sentence.startswith("rank 2 has ended; 3 wait for it in all_reduce #3")
