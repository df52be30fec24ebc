"""The host's diagnosis agent as a real process: assignments, reports, and what it may do to the handler: nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.diagnosis.agent.made import S, call, hung, ring
from tests.unit.steering.peers import until
from unickpt.base.errors import UnickptError
from unickpt.base.round_folder import RINGS, RINGS_JOB, folder_of_round, note_saver
from unickpt.diagnosis.agent.server import fetch, send
from unickpt.diagnosis.recording.ring_folder import SessionNote, read_folder, write_note
from unickpt.diagnosis.session import _folder
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.steering.host import host_agent
from unickpt.steering.host.host_agent import HostAgent
from unickpt.steering.policy.policy import Fault
from unickpt.steering.policy.reports import HubReport

Made = Callable[[str], tuple[HostAgent, list[HubReport]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Make agents of hosts, with rounds below ``tmp_path``."""
    monkeypatch.setattr(host_agent, "SHARED_MEMORY", tmp_path)
    for name in (RINGS, RINGS_JOB):
        monkeypatch.setenv(name, "")
    made: list[HostAgent] = []

    def one(name: str) -> tuple[HostAgent, list[HubReport]]:
        reports: list[HubReport] = []
        made.append(HostAgent("job", b"key", lambda: name, lambda: "127.0.0.1", True, reports.append))
        return made[-1], reports

    yield one
    for agent in made:
        pid = agent.pid
        agent.close()
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended with the other side of its pipe
            if pid:
                psutil.Process(pid).kill()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process in which nothing moves."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def ring_folder(agent: HostAgent, epoch: tuple[int, int], hub: str, is_hub: bool) -> Path:
    agent.begin(epoch, hub, is_hub)
    return Path(os.environ[RINGS])


def ranks_at(address: str) -> set[int]:
    try:
        return set(fetch(address).ranks)
    except (OSError, UnickptError):
        return set()


def test_one_agent_for_all_rounds_with_the_hosts_of_the_ranks_and_nothing_of_earlier_rounds(
    make: Made, sleeper: subprocess.Popen[bytes]
) -> None:
    """Two hosts, four ranks; then a round of one rank on the other host, which collects."""
    (a, of_a), (b, of_b) = make("a"), make("b")
    pids = (a.pid, b.pid)
    hub = a.hub((1, 1))
    on_a, on_b = ring_folder(a, (1, 1), hub, True), ring_folder(b, (1, 1), hub, False)
    hung(on_a, since_s=130)
    for rank in (2, 3):
        (on_a / f"{rank:05d}.ring").rename(on_b / f"{rank:05d}.ring")
    now_ns = time.monotonic_ns()
    culprit = ring(on_b, 2, pid=sleeper.pid)  # another process: this one moves
    for number in (1, 2):
        call(culprit, number, now_ns - 150 * S, now_ns - 149 * S)
    culprit.state(heartbeat_ns=now_ns, step=20, newest=2, phase=0)
    for folder in (on_a, on_b):
        write_note(folder, SessionNote(str(folder)))
    found: Any = until(lambda: next((each for each in of_a if each.findings), None))
    assert (found.epoch, found.step) == ((1, 1), 20)
    (finding,) = found.findings
    assert (finding.fault, finding.hosts, finding.ranks) == (Fault.HUNG, ("b",), (2,))
    assert finding.text.startswith("unickpt HANG rank=2 host=b op=all_reduce seq=3 group=")
    until(lambda: any(each.findings and each.findings[0].still_s > 0 for each in of_a))  # measured on b, where the rank is
    assert ranks_at(hub) == {0, 1, 2, 3}
    for agent in (a, b):
        agent.end(last_look=False)
    second = b.hub((1, 2))
    assert second != hub
    alone = ring_folder(b, (1, 2), second, True)
    hung(alone, culprit=9, since_s=1, world=1)
    write_note(alone, SessionNote(str(alone)))
    until(lambda: any(each.epoch == (1, 2) for each in of_b))
    assert ranks_at(second) == {0}
    until(lambda: ranks_at(hub) == set())  # the agent of the other host ends its round by itself
    assert (a.pid, b.pid) == pids
    assert {each.epoch for each in of_a} == {(1, 1)}


def test_snapshots_of_a_stranger_are_refused(make: Made) -> None:
    """The address, which may be seen on the network, is not enough."""
    a, _ = make("a")
    hub = a.hub((1, 1))
    folder = ring_folder(a, (1, 1), hub, True)
    hung(folder, since_s=130)
    snapshot = take_snapshot(read_folder(folder))
    write_note(folder, SessionNote(str(folder)))
    until(lambda: ranks_at(hub))
    for key in (b"", b"guess"):
        with pytest.raises(ConnectionError, match="404"):
            send(hub, "b", snapshot, key)
    send(hub, "b", snapshot, bytes.fromhex(a._key))


def test_an_agent_that_ends_is_started_again_in_the_same_round(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    a, reports = make("a")
    hub = a.hub((1, 1))
    folder = ring_folder(a, (1, 1), hub, True)
    hung(folder, since_s=130)
    write_note(folder, SessionNote(str(folder)))
    until(lambda: any(each.findings for each in reports))
    reports.clear()
    pid = a.pid
    psutil.Process(pid).kill()
    until(lambda: any(each.findings for each in reports))
    assert a.pid not in (0, pid)
    assert "has ended (status -9). Training is not affected. It is started again" in caplog.text
    for _ in range(3):
        pid = until(lambda: a.pid)
        psutil.Process(pid).kill()
        until(lambda pid=pid: a.pid != pid)
    until(lambda: "Until the next round no verdict leads to an order" in caplog.text)
    assert a.pid == 0
    ring_folder(a, (1, 2), "", False)
    assert a.pid


def test_garbage_from_the_agent_changes_nothing(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [b"{}", b"[1]", b"\xff\x00", b"[" * 100_000, b'{"epoch": [1, 1], "step": 1, "pause_s": 0, "findings": [{}]}']
    whole = b'{"epoch": [1, 1], "step": 7, "pause_s": 0, "findings": []}'
    (tmp_path / "said").write_bytes(b"\n".join([*lines, whole, b""]))

    def says(arguments: list[str], **more: Any) -> Any:
        assert arguments
        return subprocess.Popen(
            ["sh", "-c", f"cat {tmp_path}/said; cat >/dev/null"], stdin=subprocess.PIPE, stdout=more["stdout"]
        )

    monkeypatch.setattr(host_agent, "run_isolated", says)
    _, reports = make("a")
    until(lambda: reports == [HubReport((1, 1), 7)])
    assert "report 1 of the diagnosis agent is malformed and changes nothing" in caplog.text


def test_an_agent_that_cannot_be_started_is_a_warning(
    make: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no process")

    monkeypatch.setattr(host_agent, "run_isolated", fails)
    a, _ = make("a")
    assert (a.hub((1, 1)), a.pid) == ("", 0)
    a.begin((1, 1), "", is_hub=True)
    a.end(last_look=True)
    assert not os.environ.get(RINGS)
    assert caplog.text.count("Training is not affected") == 2


def test_a_round_without_timing_leaves_no_folder_and_old_rounds_are_removed(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    a, _ = make("a")
    for number in range(1, 6):
        folder = ring_folder(a, (1, number), "", False)
        note_saver()
        assert a.commits() == 0
        if number in (2, 3, 4):
            (folder / "00000.ring").write_bytes(b"records")
    assert {folder.name for folder in tmp_path.iterdir()} == {Path(each).name for each in a._folders}
    assert len(list(tmp_path.iterdir())) == 2
    a.close()
    assert len(list(tmp_path.iterdir())) == 1
    shutil.rmtree(tmp_path)


def test_workers_take_the_folder_of_their_round_and_a_job_within_the_job_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RINGS, "/dev/shm/round")
    monkeypatch.setenv(RINGS_JOB, "job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert folder_of_round() == Path("/dev/shm/round")
    assert _folder(folder_of_round(), None, "job") == Path("/dev/shm/round")
    assert _folder(folder_of_round(), tmp_path, "job") == tmp_path / "round"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "inner")
    assert folder_of_round() is None
