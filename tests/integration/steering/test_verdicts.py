"""Faults in timed jobs under unmodified torchrun agents: a host is out, or the workers start again, or the job stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs.steering.agents import LIMIT_S, Agents, Start, host_of
from tests.jobs.steering.timed_worker import SAVE
from unickpt.cli.main import main
from unickpt.steering.publishing.chronicle import read_history
from unickpt.steering.state.history import merged
from unickpt.steering.state.timeline import job_times

SHORT = "stopped_seconds=5,hang_seconds=5,still_seconds=2,loop_seconds=3,out_seconds=600,retries=1,check_share=0.02"
LOST = 50  # steps, 2.5 s: agents see the first and the last of them a second late


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path, "1:2", worker="timed_worker.py", conf=f"{SHORT},history={tmp_path / 'history'}")
    yield agents
    agents.close()


def started(job: Agents) -> list[Start]:
    """Start two hosts, and wait until the deadline of a call is that of the job's own steps."""
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    job.until_step(20)
    assert [host_of(job, each) for each in first] == ["n1", "n2"]
    return first


def fault(job: Agents, rank: int, kind: str) -> None:
    """Make a fault ``LOST`` steps after the next checkpoint: a round after it has enough steps for a deadline of its own."""
    (job.folder / "fault.new").write_text(f"{rank} {kind} {job.step() + SAVE + LOST}")
    (job.folder / "fault.new").rename(job.folder / "fault")


def watchers(job: Agents) -> list[psutil.Process]:
    """Return the diagnosis agents of the job."""
    children = [child for agent in job.running.values() for child in psutil.Process(agent.pid).children()]
    return [child for child in children if "unickpt.steering.host.watcher" in " ".join(child.cmdline())]


def test_hosts_of_stopped_and_looping_ranks_are_out_and_a_person_admits_them(
    job: Agents, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One job: SIGSTOP of the rank on n2, n2 admitted by a person, then an endless loop of rank 0 on n1, which leads."""
    first = started(job)
    agents = watchers(job)
    os.kill(first[1].pid, signal.SIGSTOP)
    second = job.round(first[0].round, world=1)
    assert host_of(job, second[0]) == "n1"
    job.until_said("order: park n2 for 600 s: STOPPED_OUT: unickpt HANG rank=1 ")
    assert not psutil.pid_exists(first[1].pid)
    given = ["--rdzv-endpoint", f"localhost:{job.port}", "--rdzv-id", job.identifier, "--memory-folder", str(tmp_path)]
    assert main(["hosts", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["n1", "0", "0", "running"], ["n2", "-", "-", "parked"]]
    assert main(["hosts", "admit", "n2", *given]) == 0
    third = job.round(second[0].round, world=2)
    job.until_step(third[0].step + 20)
    fault(job, 0, "loop")
    job.until_said("order: park n1 for 600 s: HUNG_OUT: unickpt HANG rank=0 ")
    fourth = job.round(third[0].round, world=1)
    assert host_of(job, fourth[0]) == "n2"
    assert not psutil.pid_exists(third[0].pid)
    assert watchers(job) == agents, "one diagnosis agent for each host, through all rounds"
    job.finish()
    check_history(job, capsys)


def check_history(job: Agents, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the four rounds, why they ended, and where every second has gone."""
    files, problems = read_history(job.folder / "history")
    assert (len(files), problems) == (2, [])
    times = job_times(merged(files))
    assert [(each.hosts, each.world, each.cause) for each in times.rounds] == [
        (("n1", "n2"), 2, "STOPPED_OUT"), (("n1",), 1, "hosts joined"), (("n1", "n2"), 2, "HUNG_OUT"), (("n2",), 1, "finished"),
    ]  # fmt: skip
    assert (times.steps_known, times.finished) == (True, True)
    stopped, _, looped = times.downtimes[1:4]
    assert min(stopped.stalled_s, looped.stalled_s) >= 3.5, "the deadlines are 5 s, and the last step is seen a little late"
    assert all(each.starting_s > 0.3 and each.regrouping_s < 60 for each in times.downtimes[:4]), times.downtimes
    assert looped.repeating_s > 0, f"{LOST} steps since the checkpoint are made again"
    assert times.training_s + sum(each.seconds for each in times.downtimes) == pytest.approx(times.wall_s, abs=0.5)
    assert main(["report", str(job.folder / "history"), "-o", str(job.folder / "report.html")]) == 0
    assert "x STOPPED_OUT" in capsys.readouterr().out


def test_mismatched_calls_restart_the_workers_and_then_stop_the_job(job: Agents) -> None:
    """No host is out. Retries are 1: the second round without progress is the last one."""
    started(job)
    fault(job, 1, "mismatch")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(agent.poll() is None for agent in job.running.values()):
        time.sleep(0.1)
    assert {agent.poll() for agent in job.running.values()} == {1}, job.text()
    for path in job.outputs:
        said = path.read_text()
        assert said.count("order: restart: PROGRAM: unickpt MISMATCH rank=") == 1, said
        assert said.count("order: stop: NO_PROGRESS: 1 restarts without progress; PROGRAM: unickpt MISMATCH rank=") == 1, said
        assert "order: park" not in said
    assert len({each.round for each in job.starts()}) == 2


def test_training_goes_on_without_diagnosis_and_a_killed_rank_starts_again(job: Agents) -> None:
    job.conf = ""
    first = started(job)
    for watcher in watchers(job):
        watcher.kill()
    job.until_said("the diagnosis agent of this host has ended (status -9). Training is not affected. It is started again")
    job.until_step(job.step() + 20)
    assert sorted(job.starts()) == first
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.round(first[0].round, world=2)
    assert [host_of(job, each) for each in second] == ["n1", "n2"]
    job.until_said("unickpt HANG rank=1 ")
    assert "steering: order:" not in job.text()
    job.finish()
