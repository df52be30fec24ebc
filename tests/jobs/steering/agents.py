"""Unmodified torchrun agents on this machine, with the backend that the package installs. The hosts differ by name only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.repository import REPO
from unickpt.base.private_files import SHARED_MEMORY, own_folders
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
    """Agents of one job.

    Args:
        folder: folder of the job.
        nodes: ``--nnodes``.
        expiry_s: ``expiry_seconds``.
        worker: script beside this module, or the path of one.
        conf: further options of ``--rdzv-conf``.
    """

    def __init__(
        self, folder: Path, nodes: str, expiry_s: int = 60, worker: str = "worker.py", conf: str = ""
    ) -> None:  # fmt: skip
        self.folder, self.nodes, self.port, self.expiry_s = folder, nodes, free_port(), expiry_s
        self.program, self.conf = [str(Path(__file__).parent / worker), str(folder)], conf
        self.launcher, self.backend = "torch.distributed.run", "unickpt"
        self.endpoint = f"localhost:{self.port}"
        self.identifier = f"job{self.port}"
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.outputs: list[Path] = []

    def start(self, name: str, *arguments: str, workers: int = 1) -> None:
        conf = f"host={name},join_seconds=2,expiry_seconds={self.expiry_s}" + (f",{self.conf}" if self.conf else "")
        output = self.folder / f"{name}-{len(self.outputs)}.txt"
        self.outputs.append(output)
        command = [
            *self.prefix(name), sys.executable, "-m", self.launcher, "--nnodes", self.nodes,
            "--nproc-per-node", str(workers), "--rdzv-backend", self.backend, "--rdzv-id", self.identifier,
            "--rdzv-endpoint", self.endpoint, "--rdzv-conf", conf, "--max-restarts", "20", *arguments, *self.program,
        ]  # fmt: skip
        with output.open("w") as file:
            self.running[name] = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment(REPO, **self.variables(name)),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def prefix(self, name: str) -> list[str]:  # noqa: ARG002
        """Return how the command of an agent begins."""
        return []

    def variables(self, name: str) -> dict[str, str]:  # noqa: ARG002
        """Return variables to add to the environment of an agent."""
        return {}

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

    def commits(self) -> list[int]:
        """Return the steps of the complete checkpoints that the workers have saved with unickpt."""
        return sorted(int(file.parent.name[len("step") :]) for file in self.folder.glob("checkpoints/step*/manifest.json"))

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
            runs = any(agent.poll() is None for agent in self.running.values())
            assert runs and time.monotonic() < deadline, f"no agent says {words!r}\n{self.text()}"  # noqa: PT018
            time.sleep(0.1)

    def rings(self) -> list[Path]:
        """Return the folders of the rounds that are left."""
        return own_folders(SHARED_MEMORY, f"unickpt-{os.geteuid()}-{self.identifier}-")

    def close(self) -> None:
        """Kill all agents with their workers, and remove the rings."""
        for agent in self.running.values():
            end(agent)
        for folder in self.rings():
            shutil.rmtree(folder, ignore_errors=True)

    def finish(self) -> None:
        """Let the program end, and check that all agents end with success."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self.running.values()):
            time.sleep(0.1)
        assert {name: agent.poll() for name, agent in self.running.items()} == dict.fromkeys(self.running, 0), self.text()


def host_of(agents: Agents, start: Start) -> str:
    """Return the name of the agent whose worker it is."""
    parent = psutil.Process(start.pid).ppid()
    return next(name for name, agent in agents.running.items() if agent.pid == parent)
