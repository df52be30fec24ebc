"""Unmodified torchrun agents on this machine, with the backend that the package installs. The hosts differ by name only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.repository import REPO
from unickpt.testing.launch import end, environment, free_port

LIMIT_S = 240.0  # on a busy machine


class Start(NamedTuple):
    """One start of a worker."""

    round: str
    rank: int
    world: int
    step: int
    pid: int


class Agents:
    """Agents of one job."""

    def __init__(self, folder: Path, nodes: str, expiry_s: int = 60) -> None:
        self.folder, self.nodes, self.port, self.expiry_s = folder, nodes, free_port(), expiry_s
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.outputs: list[Path] = []

    def start(self, name: str, *arguments: str, workers: int = 1) -> None:
        output = self.folder / f"{name}-{len(self.outputs)}.txt"
        self.outputs.append(output)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", str(workers),
            "--rdzv-backend", "unickpt", "--rdzv-id", "job", "--rdzv-endpoint", f"localhost:{self.port}",
            "--rdzv-conf", f"host={name},join_seconds=2,expiry_seconds={self.expiry_s}", "--max-restarts", "20", *arguments,
            str(Path(__file__).with_name("worker.py")), str(self.folder),
        ]  # fmt: skip
        with output.open("w") as file:
            self.running[name] = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment(REPO),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill the agent and its workers at once, as a failing machine does."""
        agent = self.running.pop(name)
        family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        for process in family:
            process.kill()
        agent.wait()

    def starts(self) -> list[Start]:
        file = self.folder / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Start(line.split()[0], *(int(word) for word in line.split()[1:])) for line in lines]

    def round(self, after: str, world: int) -> list[Start]:
        """Wait for a later round of this size, and for 5 steps in it. Return its workers by rank."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = sorted(
                (each for each in self.starts() if each.round > after and each.world == world), key=lambda each: each[:2]
            )
            last = [each for each in found if each.round == found[-1].round]
            if len(last) == world and self.step() >= last[0].step + 5:
                assert [each.rank for each in last] == list(range(world))
                return last
            time.sleep(0.1)
        raise AssertionError(f"no round of {world} workers after {after}: {self.starts()}\n{self.text()}")

    def step(self) -> int:
        file = self.folder / "saved"
        return int(file.read_text()) if file.exists() else 0

    def text(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.outputs)

    def until_step(self, step: int) -> None:
        """Wait for a step."""
        deadline = time.monotonic() + LIMIT_S
        while self.step() < step:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def until_said(self, words: str) -> None:
        """Wait for words in the output of an agent."""
        deadline = time.monotonic() + LIMIT_S
        while words not in "".join(path.read_text() for path in self.outputs):
            assert time.monotonic() < deadline, f"no agent says {words!r}\n{self.text()}"
            time.sleep(0.1)

    def finish(self) -> None:
        """Let the program end, and check that all agents end with success."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self.running.values()):
            time.sleep(0.1)
        assert {name: agent.poll() for name, agent in self.running.items()} == dict.fromkeys(self.running, 0), self.text()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    agents = Agents(tmp_path, *request.param)
    yield agents
    for agent in agents.running.values():
        end(agent)


def host_of(agents: Agents, start: Start) -> str:
    """Return the name of the agent whose worker it is."""
    parent = psutil.Process(start.pid).ppid()
    return next(name for name, agent in agents.running.items() if agent.pid == parent)


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


@pytest.mark.parametrize("job", [("1:3",)], ids=["1:3"], indirect=True)
def test_the_host_of_rank_0_and_of_the_endpoint_dies_and_returns(job: Agents) -> None:
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
    job.finish()


@pytest.mark.parametrize("job", [("2",)], ids=["2"], indirect=True)
def test_a_spare_takes_the_place_of_a_host_that_is_told_to_end(job: Agents) -> None:
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    job.start("n3")
    job.until_said("waiting: n3 is a spare")
    time.sleep(2.0)
    assert len(job.starts()) == 2, "a spare does not restart the others"
    os.kill(first[1].pid, signal.SIGSTOP)  # a stopped worker must not cost torchrun's 30 s
    began_s = time.monotonic()
    job.running.pop("n1").send_signal(signal.SIGTERM)
    second = job.round(first[0].round, world=2)
    assert [host_of(job, each) for each in second] == ["n3", "n2"]
    assert time.monotonic() - began_s < 30 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    job.start("n1")
    job.until_said("waiting: n1 is a spare")
    job.finish()


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
def test_a_program_that_always_fails_ends_on_all_hosts(job: Agents) -> None:
    (job.folder / "saved").write_text("no number")
    for name in ("n1", "n2"):
        job.start(name, "--max-restarts", "0")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(agent.poll() is None for agent in job.running.values()):
        time.sleep(0.1)
    assert [agent.poll() for agent in job.running.values()] == [1, 1], job.text()
