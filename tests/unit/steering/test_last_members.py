"""A host that returns to the endpoint finds the job that went on without it, and does not begin another one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.steering.peers import KEY, Job, hosts, until
from unickpt.steering.agent import peer as peer_module
from unickpt.steering.agent.peer import Peer
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, Close
from unickpt.steering.wire.codec import split_address
from unickpt.steering.wire.last_members import file_of, forget, recall, remember
from unickpt.testing.launch import free_port

LIMITS = Limits(1, 3, join_s=0.2, expiry_s=3.0, settle_s=0.1, self_check=False)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """Jobs of one key, each with an endpoint of its own. Their files are below ``tmp_path``."""
    monkeypatch.setattr(peer_module, "file_of", lambda *given: file_of(*given, tmp_path))
    made = [Job(LIMITS), Job(LIMITS)]
    yield made
    for job in made:
        for peer in job.peers:
            peer.close()


def file(tmp_path: Path, job: Job, name: str) -> Path:
    return file_of(KEY, name, job.endpoint, tmp_path)


def test_addresses_are_kept_on_the_host_until_the_job_is_closed(jobs: list[Job], tmp_path: Path) -> None:
    a = jobs[0].start("a")
    until(lambda: a.leads)
    b = jobs[0].start("b")
    until(lambda: hosts(b) == {"a", "b"})
    for peer in (a, b):
        peer.say(Arrived(peer.name, peer.incarnation))
    until(lambda: recall(file(tmp_path, jobs[0], "a")) == [b.address])
    until(lambda: recall(file(tmp_path, jobs[0], "b")) == [a.address])
    a.order([Close("asked")])
    for peer in (b, a):
        until(lambda peer=peer: (state := peer.read()) and state.closed)  # type: ignore[misc]
        peer.close()
    assert recall(file(tmp_path, jobs[0], "a")) == recall(file(tmp_path, jobs[0], "b")) == []


def test_a_host_that_returns_follows_the_leader_of_the_others(jobs: list[Job], tmp_path: Path) -> None:
    leader = jobs[0].start("b")
    until(lambda: leader.leads)
    gone = f"127.0.0.1:{free_port()}"
    remember(file(tmp_path, jobs[1], "a"), [gone, leader.address])
    returned = jobs[1].start("a")
    until(lambda: hosts(returned) == {"a", "b"})
    assert not returned.leads
    until(lambda: not _free(jobs[1].endpoint))
    newcomer = jobs[1].start("c")  # knows the endpoint alone
    until(lambda: hosts(newcomer) == hosts(leader) == {"a", "b", "c"})


def _free(endpoint: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(split_address(endpoint)) != 0


def test_a_host_leads_if_none_of_the_others_is_there(jobs: list[Job], tmp_path: Path) -> None:
    remember(file(tmp_path, jobs[1], "a"), [f"127.0.0.1:{free_port()}"])
    peer = jobs[1].start("a")
    until(lambda: peer.leads)


def test_a_host_waits_while_the_others_look_for_a_leader(jobs: list[Job], tmp_path: Path) -> None:
    other = jobs[0].start("b")
    until(lambda: other.leads)
    state = other.read()
    assert state is not None
    with other._copy.changed:
        other._copy.follow(f"127.0.0.1:{free_port()}")
    other._stopped.set()  # it answers, and finds no leader
    remember(file(tmp_path, jobs[1], "a"), [other.address])
    peer = jobs[1].start("a")
    time.sleep(1.5)
    assert not peer.leads
    until(lambda: peer.leads)  # after ``expiry_s``


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1, 2]", "[" * 100_000])
def test_a_damaged_file_names_no_host(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert recall(path) == []
    forget(path)
    forget(path)
    assert isinstance(Peer("a", "localhost:1", LIMITS, KEY), Peer)


def test_files_of_jobs_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    own, recent, old = (file_of(KEY, name, "localhost:1", tmp_path) for name in "abc")
    for each in (own, recent, old):
        remember(each, ["host:1"])
    for each in (own, old):
        os.utime(each, (0, time.time() - 100 * 86400))
    remember(own, ["host:2"])
    assert (recall(own), recall(recent), old.exists()) == (["host:2"], ["host:1"], False)
