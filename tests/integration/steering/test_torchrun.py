"""Unmodified torchrun agents on this machine, with the backend that the package installs. The hosts differ by name only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.jobs.steering.agents import LIMIT_S, Agents, host_of
from tests.jobs.steering.worker import SAVE, STEP_S
from unickpt.cli.main import main
from unickpt.steering.state.admission import FRESH_S

MOST_LOST = (FRESH_S[1] + 3.0) / STEP_S  # steps between a commit and the last moment at which a round grows after it


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    agents = Agents(tmp_path, *request.param)
    yield agents
    agents.close()


def test_torch_finds_the_backend() -> None:
    (found,) = [each for each in entry_points(group="torchrun.handlers") if each.name == "unickpt"]
    assert found.value == "unickpt.steering.rendezvous:creator"


@pytest.mark.parametrize("job", [("1",)], ids=["1"], indirect=True)
def test_a_crashed_worker_of_a_single_host_starts_again_and_resumes(job: Agents) -> None:
    """With stock torchrun the workers of the second round read addresses of the first from the reused store, and fail."""
    job.start("only", workers=2)
    first = job.round("", world=2)
    os.kill(first[0].pid, signal.SIGKILL)
    second = job.round(first[0].round, world=2)
    assert second[0].step == second[1].step > 0
    assert not {each.pid for each in first} & {each.pid for each in second}
    job.finish()


@pytest.mark.parametrize("job", [("1:3", 60, "worker.py", "check_share=0.02")], ids=["1:3"], indirect=True)
def test_the_host_of_rank_0_and_of_the_endpoint_dies_and_returns(job: Agents) -> None:
    """A round grows right after a checkpoint, and the host that returns has measured itself."""
    (job.folder / "checkpoints").mkdir()
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    assert [host_of(job, each) for each in first] == ["n1", "n2"]
    job.kill("n1")
    second = job.round(first[0].round, world=1)
    assert host_of(job, second[0]) == "n2"
    job.start("n3")
    third = job.round(second[0].round, world=2)
    assert [host_of(job, each) for each in third] == ["n3", "n2"]  # n2 keeps its place, n3 takes the vacant one
    assert third[0].step > second[0].step > first[0].step
    job.start("n1")
    fourth = job.round(third[0].round, world=3)
    assert [host_of(job, each) for each in fourth] == ["n3", "n2", "n1"]
    assert "order: admit n1, which has passed its self-check: compute " in job.text()
    assert "order: admit n3" not in job.text()
    for before, after in ((second, third), (third, fourth)):
        committed = [step for step in job.commits() if step <= after[0].step]  # a job that has not saved yet grows at any time
        lost = after[0].step - max([before[0].step, *committed])
        assert not committed or lost < MOST_LOST < SAVE, (before, after, job.commits())
    job.finish()


@pytest.mark.parametrize("job", [("2", 60)], ids=["2"], indirect=True)
def test_a_spare_takes_the_place_of_a_host_that_is_told_to_end(job: Agents) -> None:
    job.conf = "order=n2+n1"  # not the order of their names
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    job.start("n3")
    job.until_said("waiting: n3 is a spare")
    time.sleep(2.0)
    assert len(job.starts()) == 2, "a spare does not restart the others"
    assert [host_of(job, each) for each in first] == ["n2", "n1"]
    os.kill(first[0].pid, signal.SIGSTOP)  # a stopped worker must not cost torchrun's 30 s
    began_s = time.monotonic()
    job.running.pop("n1").send_signal(signal.SIGTERM)
    second = job.round(first[0].round, world=2)
    assert [host_of(job, each) for each in second] == ["n2", "n3"]
    assert f"round {first[0].round} differs" not in job.text()
    assert f"round {second[0].round} differs from --rdzv-conf order=: not in this round: n1; not in the order: n3" in job.text()
    assert time.monotonic() - began_s < 30 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    job.finish()


@pytest.mark.parametrize("job", [("1:2",)], ids=["1:2"], indirect=True)
def test_all_ranks_save_one_step_when_a_host_is_told_to_end(job: Agents) -> None:
    """The other host goes on from that step, and ends as told in its turn."""
    job.program[0] = str(Path(__file__).parents[2] / "jobs/steering/stopping_worker.py")
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    told_s = time.time()
    leaving = job.running.pop("n2")
    leaving.send_signal(signal.SIGTERM)
    second = job.round(first[0].round, world=1)
    assert leaving.wait(30) == -signal.SIGTERM, "the exit code of a job that is told to end"
    ends = [line.split() for line in (job.folder / "ends").read_text().splitlines()]
    assert [(end[0], end[2]) for end in ends] == [(first[0].round, "2")] * 2
    assert {end[3] for end in ends} == {str(second[0].step)}, "both ranks have saved the step from which the job goes on"
    assert max(float(end[5]) for end in ends) - told_s < 5.0 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    said = job.text()
    assert "has received SIGTERM: all ranks save at the same step boundary, and end with exit code 143" in said
    assert "attempts left" not in said, "no restart is used up"
    job.finish()


@pytest.mark.parametrize("job", [("1:2",)], ids=["1:2"], indirect=True)
def test_a_person_ends_the_job_and_so_does_a_worker_that_is_told_alone(job: Agents) -> None:
    """In both cases all ranks save, the exit code is 143, and the next start goes on."""
    job.program[0] = str(Path(__file__).parents[2] / "jobs/steering/stopping_worker.py")
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    assert main(["hosts", "end", "--rdzv-endpoint", job.endpoint, "--rdzv-id", job.identifier]) == 0
    assert [job.running.pop(name).wait(60) for name in ("n1", "n2")] == [-signal.SIGTERM] * 2, job.text()
    saved = {line.split()[3] for line in (job.folder / "ends").read_text().splitlines()}
    assert len(saved) == 1, "both have saved the same step"
    assert "attempts left" not in job.text(), "no restart is used up"
    (job.folder / "starts").unlink()
    job.start("n1", "--max-restarts", "0")
    (second,) = job.round("", world=1)
    assert second.step == int(*saved) > first[0].step
    os.kill(second.pid, signal.SIGTERM)  # only the worker: with restarts left, torchrun would start it again
    assert job.running.pop("n1").wait(60) == -signal.SIGTERM, job.text()


@pytest.mark.parametrize("job", [("1:2", 8)], ids=["1:2"], indirect=True)
def test_a_healthy_run_goes_on_while_the_leader_is_silent(job: Agents) -> None:
    """The agent of n1 is stopped, not its workers. n2 cannot know whether n1 has ended, so it must not go on alone."""
    job.start("n1")
    job.until_said("this agent leads")
    job.start("n2")
    first = job.round("", world=2)
    job.running["n1"].send_signal(signal.SIGSTOP)
    job.until_said("too few of the other hosts can be reached")
    job.until_step(job.step() + 5)
    job.running["n1"].send_signal(signal.SIGCONT)
    time.sleep(2.0)
    assert [each for each in sorted(job.starts()) if each.round >= first[0].round] == first
    job.finish()


@pytest.mark.parametrize("job", [("2",)], ids=["2"], indirect=True)
def test_a_program_that_cannot_start_ends_on_all_hosts_with_its_error(job: Agents) -> None:
    """Not after the 20 restarts that it may have. The hosts have IPv6 addresses."""
    job.endpoint = f"[::1]:{job.port}" if has_ipv6() else job.endpoint
    (job.folder / "saved").write_text("no number")
    for name in ("n1", "n2"):
        job.start(name)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(agent.poll() is None for agent in job.running.values()):
        time.sleep(0.1)
    assert [agent.poll() for agent in job.running.values()] == [1, 1], job.text()
    said = "".join(path.read_text() for path in job.outputs)
    assert "a restart meets the same error: on n" in said
    assert said.count("ValueError: invalid literal for int() with base 10: 'no number' (worker.py:") >= 2
    assert "round 1.1" in said
    assert "round 1.2" not in said


def has_ipv6() -> bool:
    """Return whether this machine has the loop-back address of IPv6."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False
