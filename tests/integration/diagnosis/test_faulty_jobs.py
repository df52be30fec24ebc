"""Faults in real jobs: the named rank and the syndrome. Also the same detection on handmade rows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.extent import in_full
from tests.support.forked_jobs import fork_ranks, start_forked
from tests.support.repository import REPO
from unickpt.diagnosis.detectors.device_waits import infer_device_waits
from unickpt.diagnosis.detectors.hangs import hangs
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import RingContents, RingReader
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import GroupInfo
from unickpt.testing import launch
from unickpt.testing.launch import environment

HOST = socket.gethostname()
WORLD, AT = 4, 12  # ranks, and the step in which something is done to one of them


def diagnosed(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "unickpt.cli.main", "diagnose", str(folder), "--after", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=REPO)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def until_found(folder: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the first verdict after all ranks have reached the step with the fault. Before it, a busy machine may stall."""
    return until_verdict(folder, process, lambda rings: len(rings) == WORLD and all(ring.step >= AT for ring in rings))


def until_verdict(
    folder: Path, process: subprocess.Popen[str], is_ready: Callable[[list[RingContents]], bool], limit_s: float = 120
) -> dict[str, Any]:
    """Return the first verdict after the rings are as wanted."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if is_ready([RingReader(path).read() for path in folder.glob("*.ring")]):
            found = diagnosed(folder)
            if found["verdicts"]:
                return found
        time.sleep(0.5)
    raise AssertionError(f"no verdict; the job has ended with {process.poll()}")


def until_told(folder: Path, wanted: str = "unickpt: rank", limit_s: float = 60) -> str:
    """Return the training log after the agent has reported a verdict."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        text = (folder / "output").read_text()
        if wanted in text:
            return text
        time.sleep(0.2)
    raise AssertionError("nothing was told")


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Starts a job with a fault, and ends it in any state."""
    started: list[subprocess.Popen[str]] = []

    def start(stage: int, fault: str, rank: int, step: int) -> tuple[Path, subprocess.Popen[str]]:
        with (tmp_path / "output").open("w") as output:
            process = start_forked(
                WORLD, "tests.jobs.diagnosis.training_worker", str(tmp_path), str(stage), fault, str(rank),
                str(step), output=output, folder=REPO, env={"GLOO_SOCKET_IFNAME": "lo"}, framework="deepspeed",
            )  # fmt: skip
        started.append(process)
        return tmp_path, process

    yield start
    for process in started:
        launch.end(process)


@pytest.mark.parametrize(
    ("stage", "fault", "rank", "state"),
    [
        (1, "stop", 2, "stopped"), (3, "loop", 0, "running"), (1, "kill", 1, "dead"),
        pytest.param(2, "sleep", 3, "sleeping", marks=in_full),
    ],
)  # fmt: skip
def test_the_rank_that_others_wait_for_is_named(job: Callable[..., Any], stage: int, fault: str, rank: int, state: str) -> None:
    folder, process = job(stage, fault, rank, AT)
    verdict, *_ = until_found(folder, process)["verdicts"]
    assert (verdict["syndrome"], verdict["ranks"]) == ("non-communication hang", [rank])
    # a rank that sees the connection of a dead one close ends as well
    assert verdict["victims"] == WORLD - 1 or (state == "dead" and 0 < verdict["victims"] < WORLD)
    assert f"rank {rank} has {'ended' if state == 'dead' else 'not entered'}" in verdict["sentence"]
    assert f"is {state}" in verdict["sentence"]
    assert f"in step {AT}" in verdict["sentence"]
    if fault != "kill":  # then the launcher ends the job, and it may be over before the deadline is
        text = until_told(folder)
        assert f"unickpt: rank {rank} has not entered" in text
        assert f"unickpt: collectives are timed; rings in {folder}" in text
        (line, *_) = [parse_line(each) for each in text.splitlines() if "unickpt HANG" in each]
        assert (line.syndrome, line.ranks.ranks, line.blocked) == (Syndrome.NON_COMMUNICATION_HANG, (rank,), WORLD - 1)
        assert (line.op, line.seq, line.state) == (verdict["op"], verdict["seq"], state)


WORKER = "diagnosis/training_worker.py"


def line_of(text: str) -> str:
    """Return the place of a line of the worker, as verdicts name it."""
    lines = (REPO / "tests" / "jobs" / WORKER).read_text().splitlines()
    return f"{WORKER}:{next(at for at, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize(
    ("fault", "syndrome", "op", "at", "hint"),
    [
        ("skip", "deadlock between groups", "all_reduce", "engine.backward(engine(", "OffTrack"),
        ("reshape", "mismatched collectives", "all_reduce", "", "OffTrack"),
        ("barrier", "mismatched collectives", "barrier", "", "OneCallMore"),
    ],
)
def test_a_rank_that_is_out_of_step_is_named_with_its_line(
    job: Callable[..., Any], fault: str, syndrome: str, op: str, at: str, hint: str
) -> None:
    folder, process = job(1, fault, 2, AT)
    verdict, *_ = until_found(folder, process)["verdicts"]
    assert (verdict["syndrome"], verdict["ranks"], verdict["op"]) == (syndrome, [2], op)
    line = parse_line(verdict["line"])
    if fault == "barrier":  # the second of its two barriers: the others have made the first one
        assert verdict["next"]["others"] == [0, 1, 3]
        assert "once more than ranks 0, 1, 3, which have ended" in verdict["next_text"]
    else:
        assert line.at == line_of(at) or verdict["gone_on"] == [2]  # gloo lets a rank with another shape through
        assert line.waits_at == line_of("dist.all_reduce(torch.ones(7))")
    assert verdict["next"]["kind"] == hint
    where = f" at {line.at}" if line.at and not verdict["gone_on"] else ""
    assert f"rank 2 calls {verdict['next']['call']['op']}{where}" in verdict["next_text"]
    assert verdict["next_text"] in until_told(folder, "unickpt: next: ")


def test_two_ranks_that_send_first_are_named_with_their_lines(job: Callable[..., Any]) -> None:
    folder, process = job(1, "send", 2, AT)
    verdict, *_ = until_found(folder, process)["verdicts"]
    assert (verdict["syndrome"], verdict["ranks"], verdict["op"]) == ("deadlock between groups", [1, 2], "send")
    assert verdict["next"]["kind"] == "SameSideFirst"
    assert f"both ranks 1 and 2 send first at {line_of('dist.send(')}" in verdict["next_text"]


@pytest.mark.parametrize(("fault", "op"), [("absent", None), ("no-group", "new_group")])
def test_a_rank_that_hangs_at_the_start_is_named(job: Callable[..., Any], fault: str, op: str | None) -> None:
    """Before it records anything, and on its way to the creation of a group. The first rank of the host, which used to start
    the agent, is the one that hangs."""
    folder, process = job(1, fault, 0, AT)
    if fault == "absent":
        verdict, *_ = until_verdict(folder, process, lambda rings: len(rings) == WORLD - 1)["verdicts"]
        assert verdict["evidence"][0] == {"kind": "NotBegun", "rank": 0, "pid": verdict["evidence"][0]["pid"], "host": HOST}
        assert "rank 0 has not come to the call that begins timing" in verdict["next_text"]
        assert list(folder.glob("started-*"))
    else:
        verdict, *_ = until_found(folder, process)["verdicts"]
        assert (verdict["op"], parse_line(verdict["line"]).at) == (op, line_of("time.sleep(3600)  # the others"))
        assert parse_line(verdict["line"]).waits_at == line_of("dist.new_group()")
    assert (verdict["syndrome"], verdict["ranks"]) == ("non-communication hang", [0])


@pytest.mark.parametrize(
    ("fault", "rank", "flights"), [pytest.param("loop@device", 1, "0", marks=in_full), ("stop@device", 3, "2000")]
)
def test_ends_of_calls_need_not_be_known(
    job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: str, rank: int, flights: str
) -> None:
    """What ends on a device is only seen to begin: who has not entered what the others are in is named all the same, whether
    torch's flight recorder tells what has ended or not."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", flights)
    folder, process = job(2, fault, rank, AT)
    verdict, *_ = until_found(folder, process)["verdicts"]
    assert (verdict["syndrome"], verdict["ranks"]) == ("non-communication hang", [rank])
    rings = read_folder(folder).ranks
    calls = [ring.records[ring.records["op"] <= Op.RECEIVE] for number, ring in rings.items() if number != rank]
    calls = [each[each["op"] != Op.NEW_GROUP] for each in calls]  # the creation of a group ends on the host
    waits = [int((each["wait_ns"] > 0).sum()) for each in calls]  # a rank may not have asked its recorder yet
    assert max(waits) == int(flights != "0")
    assert flights != "0" or not any((each["end_ns"] > 0).any() for each in calls)


def test_a_rank_that_has_not_come_to_the_checkpoint_is_named(job: Callable[..., Any]) -> None:
    folder, process = job(2, "no-save", 1, AT)
    verdict, *_ = until_found(folder, process)["verdicts"]
    assert (verdict["ranks"], verdict["cause"]) == ([1], "checkpoint")
    assert "in a checkpoint" in verdict["sentence"]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_training_continues_without_its_agent_and_next_to_invalid_rings(job: Callable[..., Any]) -> None:
    folder, process = job(1, "none", 0, 150)
    (folder / "00009.ring").write_bytes(b"this is none")
    end, agents = time.monotonic() + 120, list[psutil.Process]()
    while time.monotonic() < end and not agents:
        time.sleep(0.05)
        agents = [
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if "unickpt.diagnosis.agent" in command_of(each)
        ]
    agents[0].kill()
    assert process.wait(120) == 0
    found = diagnosed(folder)
    assert found["verdicts"] == []
    assert "00009.ring" in found["problems"][0]
    assert all(rank.closed and rank.step > 150 for rank in read_folder(folder).ranks.values())


@pytest.mark.parametrize("stage", [3])
def test_a_sound_job_has_steps_and_phases_and_no_verdict(tmp_path: Path, stage: int) -> None:
    fork_ranks(
        2, "tests.jobs.diagnosis.training_worker", str(tmp_path), str(stage), "none", "0", "6",
        env={"GLOO_SOCKET_IFNAME": "lo"}, framework="deepspeed",
    )  # fmt: skip
    assert diagnosed(tmp_path)["verdicts"] == []
    found = read_folder(tmp_path)
    for rank in found.ranks.values():
        steps = rank.records[rank.records["op"] == Op.STEP]
        assert len(steps) == 6
        assert rank.closed
        phases = set(rank.records["phase"].tolist())
        assert phases >= {int(Phase.OPTIMIZER)} | ({int(Phase.FORWARD)} if stage == 3 else set())
        labels = {entry["label"] for entry in rank.communicators}
        assert "data parallel" in labels or stage == 3  # which takes the default group for all it does


# ---------------------------------------------------------------- made-up rows


def on_device(entries: Any, members: dict[int, list[int]], *, all_stand: bool = False) -> list[Verdict]:
    """No call is known to have ended or to be waited for."""
    groups = {c: np.array(m) for c, m in members.items()}
    known = rows(*entries)
    known["ended"] = 0
    made = infer_device_waits(known, set(members), groups, all_stand=all_stand)
    return hangs(made, groups, {comm: GroupInfo(f"{comm}", "", ()) for comm in members}, before_ns=1_000)


def test_a_rank_that_is_behind_on_a_device_is_named() -> None:
    entries = [(0, 0, 5, 0), (1, 0, 5, 0), (2, 0, 4, 0)]
    (verdict,) = on_device(entries, {0: [0, 1, 2]})
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.NON_COMMUNICATION_HANG, (2,), 2)


def test_a_device_call_that_all_ranks_entered_is_presumed_to_have_ended() -> None:
    entries = [(0, 0, 5, 0), (1, 0, 5, 0)]
    assert on_device(entries, {0: [0, 1]}) == []
    (verdict,) = on_device(entries, {0: [0, 1]}, all_stand=True)
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.COMMUNICATION_HANG, (0, 1))


def test_a_device_call_that_members_entered_with_different_shapes_is_a_mismatch() -> None:
    """Two ranks got through it and wait in the next call: gloo ends such a call on some ranks."""
    known = rows((0, 0, 4, 0), (1, 0, 5, 0), (2, 0, 4, 0), (3, 0, 5, 0), (0, 1, 1, 0), (1, 1, 1, 0), (2, 1, 1, 0), (3, 1, 1, 0))
    known["ended"] = [4, 4, 4, 4, 0, 1, 0, 1]
    known["call_ns"] = [1, 9, 1, 9, 5, 5, 5, 5]
    known["shape"][7] = known["elements"][7] = 6
    members = {comm: np.arange(4) for comm in (0, 1)}
    made = infer_device_waits(known, {0, 1}, members, all_stand=False)
    (verdict,) = hangs(made, members, {comm: GroupInfo(f"{comm}", "", ()) for comm in members}, before_ns=1_000)
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (3,), 1)


def test_a_device_call_with_different_shapes_holds_up_the_calls_behind_it() -> None:
    """All ranks have made a later call of another group, and nothing tells which calls have ended."""
    known = rows(*((rank, comm, 4 + comm, 0) for comm in (0, 1) for rank in range(4)))
    known["ended"] = 0
    known["call_ns"] = [5, 5, 5, 5, 9, 9, 9, 9]
    known["shape"][3] = known["elements"][3] = 6
    members = {comm: np.arange(4) for comm in (0, 1)}
    groups = {comm: GroupInfo(f"{comm}", "", ()) for comm in members}
    assert not infer_device_waits(known.copy(), {0, 1}, members, all_stand=False)["blocked"].any()
    made = infer_device_waits(known.copy(), {0, 1}, members, all_stand=True)
    (verdict,) = hangs(made, members, groups, before_ns=1_000)
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (3,), 4)
    same = known.copy()
    same["elements"][3] = same["elements"][0]  # as many elements of another shape
    assert not any(
        each.syndrome is Syndrome.MISMATCH
        for each in hangs(infer_device_waits(same, {0, 1}, members, all_stand=True), members, groups, before_ns=1_000)
    )
    known["entered"][7] -= 1  # a rank that others wait for comes first: calls before may differ and have ended
    made = infer_device_waits(known, {0, 1}, members, all_stand=True)
    (verdict,) = hangs(made, members, groups, before_ns=1_000)
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.NON_COMMUNICATION_HANG, (3,), 5)


def test_a_device_call_that_is_known_to_have_ended_is_not_presumed() -> None:
    made = infer_device_waits(rows((0, 0, 5, 0), (1, 0, 5, 0)), {0}, {0: np.array([0, 1])}, all_stand=True)
    assert not made["blocked"].any()


def rows(*entries: tuple[Any, ...]) -> Any:
    """``(rank, comm, entered, blocked)`` of collectives, ``(rank, (source, destination), entered, blocked)`` of pairs in
    communicator 9."""
    out = []
    for rank, where, entered, blocked in entries:
        pair = where if isinstance(where, tuple) else (-1, -1)
        op = Op.ALL_REDUCE if pair == (-1, -1) else Op.SEND if pair[0] == rank else Op.RECEIVE
        comm = where if pair == (-1, -1) else 9
        out.append((rank, comm, *pair, entered, entered - (blocked > 0), blocked, 100 + rank, int(op), 2, 5, 8, 0))
    return np.array(out, PROGRESS)


def found(entries: Any, members: dict[int, list[int]], **more: Any) -> list[Verdict]:
    named = {comm: GroupInfo(f"{comm}", "", ()) for comm in [*members, 9]}
    return hangs(rows(*entries), {c: np.array(m) for c, m in members.items()}, named, before_ns=1_000, **more)


def test_the_root_is_named_and_not_its_victims() -> None:
    """TP pairs (0, 1) and (2, 3), DP pairs (0, 2) and (1, 3): 3 hangs, 2 waits for it in TP, 0 and 1 in DP and TP."""
    entries = [(2, 1, 5, 5), (3, 1, 4, 0), (0, 2, 7, 7), (2, 2, 6, 0), (1, 3, 7, 7), (3, 3, 6, 0), (0, 0, 9, 0), (1, 0, 9, 0)]
    verdict, *more = found(entries, {0: [0, 1], 1: [2, 3], 2: [0, 2], 3: [1, 3]})
    assert (verdict.syndrome, verdict.ranks, verdict.victims, more) == (Syndrome.NON_COMMUNICATION_HANG, (3,), 3, [])


def test_a_call_that_all_have_entered_is_the_network() -> None:
    entries = [(0, 0, 4, 4), (1, 0, 4, 4), (2, 0, 4, 0)]
    verdict, *more = found(entries, {0: [0, 1, 2]})
    assert (verdict.syndrome, verdict.ranks, verdict.seq, more) == (Syndrome.COMMUNICATION_HANG, (0, 1), 4, [])


def test_a_send_and_its_receive_that_do_not_end_are_a_link() -> None:
    verdict, *more = found([(0, (0, 1), 3, 0), (1, (0, 1), 3, 3)], {})
    assert (verdict.syndrome, verdict.link, more) == (Syndrome.COMMUNICATION_HANG, (0, 1), [])


def test_a_receive_without_its_send_names_the_sender() -> None:
    """Along a pipeline: 2 waits for 1, which waits for 0."""
    entries = [(2, (1, 2), 3, 3), (1, (1, 2), 2, 0), (1, (0, 1), 3, 3), (0, (0, 1), 2, 0)]
    verdict, *more = found(entries, {})
    assert (verdict.syndrome, verdict.ranks, verdict.victims, more) == (Syndrome.NON_COMMUNICATION_HANG, (0,), 2, [])


def test_a_circle_is_a_deadlock() -> None:
    entries = [(0, 1, 1, 1), (1, 1, 0, 0), (1, 2, 1, 1), (0, 2, 0, 0)]
    (verdict,) = found(entries, {1: [0, 1], 2: [0, 1]})
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.DEADLOCK, (0, 1))


def test_the_dead_enter_nothing() -> None:
    entries = [(0, 0, 4, 4), (1, 0, 4, 0), (2, 0, 4, 4)]
    (verdict,) = found(entries, {0: [0, 1, 2]}, gone=frozenset({1}))
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.NON_COMMUNICATION_HANG, (1,))


def test_recent_calls_are_not_reported() -> None:
    assert hangs(rows((0, 0, 4, 4), (1, 0, 3, 0)), {0: np.array([0, 1])}, {0: GroupInfo("g", "", ())}, before_ns=50) == []


def test_a_rank_that_is_not_known_at_all_has_entered_nothing() -> None:
    (verdict,) = found([(0, 0, 1, 1), (1, 0, 1, 1)], {0: [0, 1, 2]})
    assert verdict.ranks == (2,)
