"""Orders between real agents and from the command line, and what a stranger can do: nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.steering.made import running
from tests.unit.steering.peers import KEY, Job, begin_round, hosts, until
from unickpt.base.options.steering import SteeringOptions
from unickpt.cli.main import main
from unickpt.steering.agent.peer import Peer
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Admit, Close, Park
from unickpt.steering.state.orders import is_to_end
from unickpt.steering.wire import asking
from unickpt.steering.wire.codec import SteeringError, dial, event_as_json, key_of, secret_key

LIMITS = Limits(1, 4, join_s=1.0, expiry_s=60.0, settle_s=0.1)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(LIMITS, lambda: Decisions(SteeringOptions()))
    yield made
    for peer in made.peers:
        peer.close()


def two_hosts(job: Job) -> tuple[Peer, Peer]:
    a = job.start("a")
    until(lambda: a.leads)
    b = job.start("b")
    until(lambda: hosts(b) == {"a", "b"})
    return a, b


def test_a_report_of_another_host_reaches_the_leader_and_the_order_all_hosts(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "unickpt")
    a, b = two_hosts(job)
    begin_round(a, b)
    b.found(HubReport((1, 1), 5, 0.0, (Finding(Fault.STOPPED, ("b",), 99.0, text="rank 1 is stopped", ranks=(1,)),)))
    state: Any = until(lambda: (now := b.read()) and now.parked and now)
    assert (state.parked["b"].reason, state.reached) == ("STOPPED_OUT: rank 1 is stopped", 5)
    assert caplog.text.count("order: park b for 300 s: STOPPED_OUT: rank 1 is stopped") == 2  # both agents are in this process


def test_a_person_parks_and_admits_a_host(job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, b = two_hosts(job)
    given = [
        "--rdzv-endpoint",
        b.address,
        "--rdzv-id",
        "job",
        "--memory-folder",
        str(tmp_path),
    ]  # of an agent that does not lead
    assert main(["hosts", "park", "b", *given]) == 0
    assert "park b: asked by " in capsys.readouterr().out
    until(lambda: (state := b.read()) and "b" in state.parked)
    assert main(["hosts", *given]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["host", "rank", "ranks", "state", "since", "reason"]
    assert first.startswith("a ")
    assert "parked" in second
    assert main(["hosts", "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["host"], row["state"]) for row in found["hosts"]] == [("a", "stopping"), ("b", "parked")]
    assert found["orders"][0].startswith("park b: asked by")
    assert main(["hosts", "park", "a", *given]) == 0
    assert "0 hosts are left, and 1 are needed: the job waits for more" in capsys.readouterr().out
    assert main(["hosts", "admit", "b", *given]) == 0
    until(lambda: (state := b.read()) and "b" not in state.parked)
    assert main(["hosts", "admit", "b", *given]) == 2
    assert main(["hosts", "park", "elsewhere", *given]) == 2
    assert "no host 'elsewhere'; the job has a, b" in capsys.readouterr().err
    state: Any = b.read()
    assert set(state.parked) == {"a"}


def test_a_person_ends_the_whole_job(job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, b = two_hosts(job)
    given = ["--rdzv-endpoint", b.address, "--rdzv-id", "job", "--memory-folder", str(tmp_path)]
    assert main(["hosts", "end", "b", *given]) == 2
    assert "leave the host out, or park it" in capsys.readouterr().err
    assert not is_to_end(running())
    assert main(["hosts", "end", *given]) == 0
    said = capsys.readouterr().out
    assert "end: asked by " in said
    assert "exit code 143" in said
    state: Any = until(lambda: (now := b.read()) and is_to_end(now) and now)
    assert (dict(state.parked), state.closed) == ({}, "")  # each agent ends by itself, when its workers have


def test_a_secret_of_a_file_is_needed_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("s\n")
    job = Job(LIMITS, key=secret_key("job", tmp_path / "secret"))
    a = job.start("a")
    try:
        until(lambda: a.leads)
        given = ["--rdzv-endpoint", job.endpoint, "--rdzv-id", "job"]
        assert main(["hosts", *given]) == 2
        assert "refuses the request: --rdzv-id and the secret must be those of the job" in capsys.readouterr().err
        assert main(["hosts", "park", "a", *given]) == 2
        until(lambda: a.refused == 2)
        assert main(["hosts", *given, "--secret-file", str(tmp_path / "secret")]) == 0
    finally:
        a.close()


def test_the_agent_on_this_host_is_found_by_its_user_alone(job: Job, tmp_path: Path) -> None:
    a, _ = two_hosts(job)
    shared = tmp_path / "shared"
    shared.mkdir()
    folder = asking.publish(shared, asking.Contact(a.address, KEY))
    ended = asking.publish(shared, asking.Contact("127.0.0.1:1", KEY))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / asking.FILE)} == {0o700, 0o600}
    assert asking.the_only(shared) == asking.Contact(a.address, KEY)
    assert not ended.exists()
    (folder / asking.FILE).write_text("[1]")
    with pytest.raises(Exception, match="no job of yours has an agent on this host"):
        asking.the_only(shared)
    shutil.rmtree(folder)


def test_agents_that_do_not_answer_hide_no_living_one(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take connections and say nothing, as an address that is gone. Few are asked at once, and the newest first."""
    a, _ = two_hosts(job)
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(asking, "ASKED_AT_ONCE", 2)
    monkeypatch.setattr(asking, "ANSWERS_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for number in range(4):
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            os.utime(asking.publish(shared, asking.Contact(address, bytes([number] * len(KEY)))), (1, 1))
        asking.publish(shared, asking.Contact(a.address, KEY))
        assert asking.published(shared) == [asking.Contact(a.address, KEY)]


@pytest.mark.parametrize(
    "request_of_a_stranger",
    [
        {"kind": "order", "id": "1", "action": "park", "host": "b", "by": "me"},
        {"kind": "hosts"},
        {"kind": "report", "events": [event_as_json(Park("b", "x"))], "seen": [0, 0]},
        {"kind": "report", "events": [], "seen": [0, 0], "found": {"epoch": [1, 1], "step": 0, "pause_s": 0, "findings": []}},
    ],
    ids=["order", "hosts", "event", "found"],
)
def test_a_stranger_cannot_give_an_order_or_read_the_hosts(job: Job, request_of_a_stranger: dict[str, Any]) -> None:
    a, b = two_hosts(job)
    for address in (a.address, b.address):
        stranger = dial(address, key_of("guess"), 2.0)
        stranger.send(request_of_a_stranger)
        with pytest.raises((EOFError, OSError)):
            stranger.receive()
    until(lambda: a.refused == b.refused == 1)
    state: Any = a.read()
    assert not state.parked


def test_malformed_orders_of_an_insider_are_refused(job: Job) -> None:
    a, b = two_hosts(job)
    source = random.Random(3)
    for _ in range(60):
        request: dict[str, Any] = {"kind": "order", "id": "1", "action": "park", "host": "b", "by": "me"}
        changed = source.choice(["kind", "id", "action", "host", "by"])
        values: list[Any] = [None, 3, [], {}, "stop", "x" * 9000, True]
        request[changed] = source.choice(values)
        if request[changed] is True:
            del request[changed]
        if changed in ("id", "by"):
            request["host"] = "nobody"
        connection = dial(a.address, KEY, 2.0)
        try:
            connection.send(request)
            assert "done" not in connection.receive()
        except (EOFError, OSError):
            pass
        finally:
            connection.close()
    state: Any = a.read()
    assert (dict(state.parked), state.closed, set(state.hosts)) == ({}, "", {"a", "b"})
    a.order([Park("b", "asked"), Admit("b"), Close("enough")])
    until(lambda: (now := b.read()) and now.closed)
    with pytest.raises(SteeringError):
        b.order([Close("again")])
