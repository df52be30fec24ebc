"""Ports for Prometheus: several jobs on one host, and the files by which Prometheus finds them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from unickpt.base.prometheus import PORTS, Scrape, open_port
from unickpt.testing.launch import free_port


def test_a_second_job_takes_the_next_free_port_and_both_are_found(tmp_path: Path) -> None:
    told: list[str] = []
    asked = [Scrape(free_port(), "127.0.0.1", str(tmp_path / "targets"), job) for job in ("llama", "")]
    first = open_port(asked[0], told.append)
    second = open_port(Scrape(asked[0].port, targets=asked[1].targets, role="critic"), told.append)
    assert first is not None
    assert second is not None
    ports = [each.listener.getsockname()[1] for each in (first, second)]
    assert asked[0].port == ports[0] < ports[1] < ports[0] + PORTS
    assert told == [f"Prometheus is answered on 127.0.0.1 port {ports[1]}: port {ports[0]} is taken, as by another job"]
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "targets").iterdir()}
    assert files == {
        f"unickpt-{socket.gethostname()}-{port}.json": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}]
        for port, labels in zip(ports, ({"job_name": "llama"}, {"role": "critic"}), strict=True)
    }
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in (tmp_path / "targets").iterdir()), "Prometheus is another user"
    for each in (first, second):
        each.withdraw()
        each.listener.close()
    assert not list((tmp_path / "targets").iterdir())


@pytest.mark.parametrize(("address", "named"), [("0.0.0.0", socket.gethostname()), ("::1", "[::1]")])
def test_targets_name_what_other_hosts_reach(address: str, named: str, tmp_path: Path) -> None:
    try:
        found = open_port(Scrape(free_port(), address, str(tmp_path)), lambda text: pytest.skip(text))
    except OSError:
        pytest.skip("no IPv6")
    assert found is not None
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())[0]["targets"] == [f"{named}:{found.listener.getsockname()[1]}"]
    found.listener.close()


def test_metrics_are_served_without_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    found = open_port(Scrape(free_port(), targets=str(tmp_path / "file")), told.append)
    assert found is not None
    found.withdraw()
    found.listener.close()
    assert len(told) == 1
    assert "the file of its targets cannot be written" in told[0]
