"""Hosts in network namespaces: a link that really fails. The table of all faults is made by ``framework_faults``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.steering.agents import Agents
from tests.jobs.steering.namespaces import LINK, Network, missing


class Hosts(Agents):
    """Agents of the light worker on a network of their own."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, "1:2", expiry_s=3, conf="join_seconds=10")
        self.network, self.endpoint = network, f"{network.address('n1')}:{self.port}"

    def prefix(self, name: str) -> list[str]:
        return self.network.command(name)

    def variables(self, name: str) -> dict[str, str]:  # noqa: ARG002
        return {"GLOO_SOCKET_IFNAME": LINK}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    network = Network(["n1", "n2"])
    agents = Hosts(tmp_path, network)
    yield agents
    agents.close()
    network.close()


def test_a_host_whose_link_fails_is_out_and_returns(job: Hosts) -> None:
    for name in ("n1", "n2"):
        job.start(name)
    first = job.round("", world=2)
    job.network.down("n2")
    second = job.round(first[0].round, world=1)
    assert {each.pid for each in second}.isdisjoint(each.pid for each in first)
    job.network.up("n2")
    third = job.round(second[0].round, world=2)
    assert third[0].step > second[0].step > first[0].step
    assert "steering: stopping the workers of round" in job.outputs[1].read_text(), "n2 learns that its round is over"
    job.finish()
