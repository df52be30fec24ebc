"""Unmodified torchrun agents with jobs of a framework, each host in a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from evidence.steering.observed import HOST
from evidence.steering.timeline import Epoch, epoch_of, steps_of
from tests.jobs.steering.agents import Agents
from tests.jobs.steering.namespaces import LINK, Network

LIMIT_S = 100.0
JOIN_S = 15  # a host of a running job that is alone at the endpoint hears of the leader in this time


@dataclass(frozen=True)
class View:
    """A round whose workers all have done a step.

    Attributes:
        epoch: the round.
        hosts, pids: of each rank.
        started_s, imported_s, resumed_s, checked_s, stepped_s: when the last rank began, had imported the framework, had
            resumed, was compared with its checkpoint, and had done its first step; in seconds since 1970.
        step: step that it resumed from.
        differences: what differs from the checkpoint.
    """

    epoch: Epoch
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    started_s: float
    imported_s: float
    resumed_s: float
    checked_s: float
    stepped_s: float
    step: int
    differences: tuple[str, ...]

    def members(self) -> set[str]:
        """Return the names of the hosts."""
        return set(self.hosts)


class Cluster(Agents):
    """Agents of one job on the hosts of a network.

    Args:
        folder: folder of the job.
        network: hosts.
        nodes: ``--nnodes``.
        program: script and arguments.
        conf: further options of ``--rdzv-conf``.
        endpoint: host of ``--rdzv-endpoint``.
        workers: ranks of each host.
        expiry_s: ``expiry_seconds``.
        more: further variables of the environment.
    """

    def __init__(
        self, folder: Path, network: Network, nodes: str, program: Sequence[str], conf: str, endpoint: str = "n1",
        workers: int = 1, expiry_s: int = 6, more: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, nodes, expiry_s=expiry_s, conf=f"join_seconds={JOIN_S}" + (f",{conf}" if conf else ""))
        self.network, self.workers, self.program, self.more = network, workers, list(program), dict(more or {})
        self.endpoint = f"{network.address(endpoint)}:{self.port}"
        self.removed: list[subprocess.Popen[str]] = []
        self.arguments: list[str] = []  # of the launcher

    def prefix(self, name: str) -> list[str]:
        """See base class."""
        return self.network.command(name)

    def variables(self, name: str) -> dict[str, str]:
        """See base class."""
        return {"GLOO_SOCKET_IFNAME": LINK, HOST: name, **self.more}

    def run(self, name: str) -> None:
        """Start the agent of a host, with ``arguments``. Other backends do not know names and addresses of namespaces."""
        more, given = list(self.arguments), self.conf
        if self.backend != "unickpt":
            address = self.network.address(name)
            more += ["--local-addr", address]
            self.conf += f",last_call_timeout=5,is_host={int(self.endpoint.startswith(address + ':'))}"
        self.start(name, *more, workers=self.workers)
        self.conf = given

    def lose(self, name: str) -> None:
        """A machine loses its power: its link is cut, and then all its processes end. No other host is told."""
        self.network.down(name)
        self.kill(name)
        shutil.rmtree(self.folder / "memory" / name, ignore_errors=True)

    def kill_agent(self, name: str) -> list[psutil.Process]:
        """Kill the agent of a host alone. Return the processes that it leaves behind."""
        agent = self.running.pop(name)
        left = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        agent.wait()
        return left

    def restore(self, name: str) -> None:
        """Start a lost host again, as a machine that has been restarted."""
        self.network.remove(name)
        self.network.add(name)
        self.run(name)

    # ------------------------------------------------------------ what has happened

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all workers."""
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def view(self, after: Epoch) -> View | None:
        """Return the newest round after this one if all of its workers have done a step."""
        of_round = [each for each in self.events() if epoch_of(each["round"]) > after]
        if not of_round:
            return None
        epoch = max(epoch_of(each["round"]) for each in of_round)
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for each in of_round:
            if epoch_of(each["round"]) == epoch:
                found.setdefault(each["what"], {})[each["rank"]] = each
        started, checked = found["started"], found.get("checked", {})
        world = next(iter(started.values()))["world"]
        resumed = found.get("resumed", {})
        if any(len(each) < world for each in (started, resumed, checked)):
            return None
        first = steps_of(self.folder).get(epoch, {}).get(resumed[0]["step"] + 1)
        if first is None or first.ranks < world:
            return None
        last = {
            what: max(each["at"] for each in found[what].values()) for what in ("started", "imported", "resumed", "checked")
        }
        return View(
            epoch, tuple(started[rank]["host"] for rank in range(world)), tuple(started[rank]["pid"] for rank in range(world)),
            last["started"], last["imported"], last["resumed"], last["checked"], first.last_s, resumed[0]["step"],
            tuple(text for each in checked.values() for text in each["differences"]),
        )  # fmt: skip

    def until(self, what: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait until something is true. Return it, or its last value at the time limit."""
        deadline = time.monotonic() + limit_s
        while True:
            value = what()
            if value or time.monotonic() > deadline:
                return value
            time.sleep(0.1)

    def settled(self, members: set[str], after: Epoch, size: int | None = None, limit_s: float = LIMIT_S) -> View | None:
        """Wait for a round after another one.

        Args:
            members: hosts of the round.
            after: the other round.
            size: number of hosts, if the round has not all of these.
            limit_s: time limit.

        Returns:
            The round; None if there is none in time.
        """
        wanted = len(members) if size is None else size

        def found() -> View | None:
            view = self.view(after)
            return view if view is not None and len(view.members()) == wanted and view.members() <= members else None

        result: View | None = self.until(found, limit_s)
        return result

    def go_on(self, steps: int, limit_s: float = LIMIT_S) -> bool:
        """Wait for further steps. Return whether they were done in time."""
        wanted = self.step() + steps
        return bool(self.until(lambda: self.step() >= wanted, limit_s))

    def worlds(self) -> dict[Epoch, int]:
        """Return the number of ranks of each round."""
        return {epoch_of(each["round"]): each["world"] for each in self.events() if each["what"] == "started"}

    def fault(self, **what: Any) -> None:
        """Ask a worker for a fault (``observed``)."""
        (self.folder / "fault.new").write_text(json.dumps(what))
        (self.folder / "fault.new").rename(self.folder / "fault")

    def no_fault(self) -> None:
        """End a fault that lasts."""
        (self.folder / "fault").unlink(missing_ok=True)

    def close(self) -> None:
        """Kill all processes, also those that an agent has left behind."""
        pids = {each["pid"] for each in self.events() if each["what"] == "started"}
        super().close()
        for pid in pids:
            _kill(pid, str(self.folder))


def _kill(pid: int, folder: str) -> None:
    """Kill a worker of a job, if the number is still its own."""
    try:
        process = psutil.Process(pid)
        if any(folder in word for word in process.cmdline()):
            os.kill(pid, 9)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
