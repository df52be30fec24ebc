"""Checks of links between hosts in network namespaces, whose links are limited or cut by the kernel."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.steering.namespaces import Network, missing
from tests.support.repository import REPO
from unickpt.testing.launch import end, environment

HOSTS = ("n1", "n2", "n3", "n4")
LIMIT_S = 90.0  # on a busy machine


class Agents:
    """An agent without workers on each host."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._outputs = {name: folder / name for name in HOSTS}
        self.running: dict[str, subprocess.Popen[str]] = {}
        for name in HOSTS:
            arguments = [name, f"{network.address('n1')}:29400", network.address(name), str(len(HOSTS))]
            command = [*network.command(name), sys.executable, str(REPO / "tests/jobs/steering/link_agent.py"), *arguments]
            with self._outputs[name].open("w") as file:
                self.running[name] = subprocess.Popen(
                    command, cwd=REPO, env=environment(REPO), stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                    text=True, start_new_session=True,
                )  # fmt: skip

    def until_said(self, name: str, words: str) -> str:
        """Wait for words of an agent, and return the rest of their line."""
        end_s = time.monotonic() + LIMIT_S
        while words not in (text := self._outputs[name].read_text()):
            assert time.monotonic() < end_s, f"{name} does not say {words!r}\n{text}"
            time.sleep(0.1)
        return text.partition(words)[2].partition("\n")[0]

    def suspect(self, by: str, link: str) -> None:
        """Let the agent of a host report a dead link."""
        file = self.running[by].stdin
        assert file is not None
        file.write(f"{link}\n")
        file.flush()


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    made = Network(HOSTS)
    yield made
    made.close()


@pytest.fixture
def agents(tmp_path: Path, network: Network) -> Iterator[Agents]:
    made = Agents(tmp_path, network)
    yield made
    for agent in made.running.values():
        end(agent)


def test_a_limited_and_a_cut_link_of_a_host_are_found_and_the_host_is_out(agents: Agents, network: Network) -> None:
    """n3 has 8 Mbit/s, then n4 loses its link. The other links have the speed of this machine."""
    for name in HOSTS:
        agents.until_said(name, "round 1 of 4 runs")
    network.slow("n3", 8.0)
    agents.suspect("n2", "n1 n3")
    measured = agents.until_said("n2", "order: check of n1 and n3: n3 is at fault, its links to other hosts are bad as well: ")
    speeds = {part.split()[0]: float(part.split()[1]) for part in measured.split(", ")}
    assert set(speeds) == {"n1-n2", "n1-n3", "n1-n4", "n2-n3", "n2-n4", "n3-n4"} - ({"n3-n4"} if len(speeds) < 6 else set())
    assert all((speed < 2) == ("n3" in link) for link, speed in speeds.items()), speeds
    agents.until_said("n2", "order: park n3 for 300 s: LINK_OUT: dead link")
    agents.until_said("n2", "round 2 of 3 runs")
    network.down("n4")
    agents.suspect("n2", "n2 n4")
    agents.until_said("n1", "check of n2 and n4: n4 is at fault, its links to other hosts are bad as well: n2-n4 unusable")
    agents.until_said("n1", "order: park n4 for 300 s: LINK_OUT: dead link")
