"""Agents of several hosts work together: requests, answers and their permissions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.diagnosis.agent.made import S, call, hung, ring
from unickpt.base.prometheus import Scrape
from unickpt.cli.main import main
from unickpt.diagnosis.agent import launch, server, telling
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.agent.server import Collector, fetch, secret_of, send, serve
from unickpt.diagnosis.agent.telling import notice
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring import SUFFIX
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import render_all
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.testing.launch import free_port


@pytest.fixture
def served() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
    server = serve(lambda: (collector, secret_of(address)), listener)
    yield collector, address
    server.shutdown()
    server.server_close()


def split(tmp_path: Path, since_s: float = 30) -> tuple[Path, Path]:
    """Write the rings of a hung job on two hosts. Rank 2 is on the second one."""
    hung(tmp_path / "a", since_s=since_s)
    (tmp_path / "b").mkdir()
    for rank in (2, 3):
        (tmp_path / "a" / f"{rank:05d}{SUFFIX}").rename(tmp_path / "b" / f"{rank:05d}{SUFFIX}")
    return tmp_path / "a", tmp_path / "b"


def looked_at_by_two(
    tmp_path: Path, served: tuple[Collector, str], since_s: float
) -> tuple[Path, Path, str, dict[str, list[str]]]:
    """Return both folders of a hung job, the collector's address, and the verdicts of each agent."""
    collector, address = served
    first, second = split(tmp_path, since_s)
    lines: dict[str, list[str]] = {"a": [], "b": []}
    agents = Agent(first, lines["a"].append, collector), Agent(second, lines["b"].append, address=lambda: address)
    for _ in range(2):
        agents[1].look(read_folder(second))
        agents[0].look(read_folder(first))
    agents[1].look(read_folder(second))
    return first, second, address, lines


def test_two_agents_are_one_view(tmp_path: Path, served: tuple[Collector, str]) -> None:
    _, _, address, lines = looked_at_by_two(tmp_path, served, since_s=30)
    # with 4 ranks and no steps, 120 s are allowed
    assert lines == {"a": [], "b": []}
    job = fetch(address)
    assert sorted(job.ranks) == [0, 1, 2, 3]
    (verdict,) = examine(job, after_s=5).verdicts
    assert verdict.ranks == (2,)


def test_the_agent_of_the_rank_at_fault_also_reports_it(
    tmp_path: Path, served: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "PLACE_S", 0.0)
    first, second, address, lines = looked_at_by_two(tmp_path, served, since_s=130)
    assert len(lines["a"]) == len(lines["b"]) == 3  # once, not in every pass
    line = parse_line(lines["b"][0])
    assert (line.syndrome, line.ranks.ranks, line.op, line.seq) == (Syndrome.NON_COMMUNICATION_HANG, (2,), "all_reduce", 3)
    assert lines["b"][1].startswith("unickpt: rank 2 has not entered all_reduce #3")
    assert lines["b"][2].startswith("unickpt: next: the others wait for rank 2")
    for folder in (first, second):  # each holds what its log shows
        (noted,) = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
        assert (noted["ranks"], noted["syndrome"]) == ([2], "non-communication hang")
        assert noted["line"] == lines["b"][0]
    verdicts = json.loads(urllib.request.urlopen(f"{address}/verdicts").read())
    assert verdicts["verdicts"][0]["sentence"].startswith("rank 2")


def test_a_verdict_waits_for_the_place_of_a_rank_on_another_host(
    tmp_path: Path, served: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "PLACE_S", 3600.0)  # the processes of this test never answer
    collector, address = served
    first, second = split(tmp_path, 130)
    lines: dict[str, list[str]] = {"a": [], "b": []}
    agents = Agent(first, lines["a"].append, collector), Agent(second, lines["b"].append, address=lambda: address)
    for _ in range(2):
        agents[1].look(read_folder(second))
        agents[0].look(read_folder(first))
    assert lines == {"a": [], "b": []}
    monkeypatch.setattr(telling, "PLACE_S", 0.0)
    agents[1].look(read_folder(second))
    agents[0].look(read_folder(first))
    assert len(lines["a"]) == len(lines["b"]) == 3


def test_nothing_is_done_about_other_calls_before_their_place_is_known(
    tmp_path: Path, served: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order comes at once, and ends the ranks."""
    monkeypatch.setattr(telling, "PLACE_S", 3600.0)
    collector, address = served
    first, second = split(tmp_path, 130)
    other = ring(second, 2)
    for number in (1, 2):
        call(other, number, time.monotonic_ns() - 140 * S, time.monotonic_ns() - 139 * S)
    call(other, 3, time.monotonic_ns() - 130 * S, 0, op=Op.BARRIER)
    other.state(heartbeat_ns=time.monotonic_ns(), step=20, newest=3, phase=0)
    lines: list[str] = []
    agents = Agent(first, lines.append, collector), Agent(second, print, address=lambda: address)

    def acted_on() -> list[tuple[Syndrome, tuple[int, ...]]]:
        agents[1].look(read_folder(second))
        found = agents[0].look(read_folder(first))
        assert found is not None
        return [(verdict.syndrome, verdict.ranks) for verdict in found.verdicts]

    assert (acted_on(), acted_on(), lines) == ([], [], [])
    monkeypatch.setattr(telling, "PLACE_S", 0.0)
    assert acted_on() == [(Syndrome.MISMATCH, (2,))]
    assert len(lines) == 3


def test_equal_sides_are_told_at_the_second_look(tmp_path: Path) -> None:
    hung(tmp_path, since_s=130, world=2, culprit=-1)
    other = ring(tmp_path, 1, 2)
    call(other, 3, time.monotonic_ns() - 130 * S, 0, op=Op.BARRIER, seq=3)
    other.state(heartbeat_ns=time.monotonic_ns(), step=20, newest=3, phase=0)
    lines: list[str] = []
    agent = Agent(tmp_path, lines.append)
    agent.look(read_folder(tmp_path))
    assert lines == []
    agent.look(read_folder(tmp_path))
    assert parse_line(lines[0]).ranks.ranks == (0, 1)


def test_a_single_agent_reports_nothing_about_other_hosts(tmp_path: Path) -> None:
    hung(tmp_path / "a", since_s=130)
    (tmp_path / "a" / f"00002{SUFFIX}").unlink()
    lines: list[str] = []
    Agent(tmp_path / "a", lines.append, address=lambda: "http://127.0.0.1:9/gone").look(read_folder(tmp_path / "a"))
    assert lines == []


def test_a_host_that_is_silent_is_unknown(
    tmp_path: Path, served: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, address = served
    first, second = split(tmp_path)
    send(address, "b", take_snapshot(read_folder(second)))
    monkeypatch.setattr("unickpt.diagnosis.agent.loop._SILENT_S", -1.0)
    Agent(first, print, collector).look(read_folder(first))
    job = fetch(address)
    assert {rank: one.state for rank, one in job.ranks.items()}[2] is State.UNKNOWN
    assert any("no data from" in problem for problem in job.problems)


@pytest.mark.parametrize("path", ["snapshot", "other/snapshot", "secret", "secret/", "secret/../snapshot", "secret/else"])
def test_only_clients_with_the_token_get_an_answer(served: tuple[Collector, str], path: str) -> None:
    base = served[1].rpartition("/")[0]
    for data in (None, b"x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/{path}", data)
        assert refused.value.code == 404


def test_the_hub_refuses_invalid_snapshots(served: tuple[Collector, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served[1]}/snapshot", b"nonsense")
    assert refused.value.code == 400
    assert served[0].others() == []


def test_prometheus_is_answered(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    hung(tmp_path)
    collector = Collector(labels={"job_name": "llama"})
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = serve(lambda: (collector, "secret"), listener, open_metrics=True)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/metrics")
        assert refused.value.code == 503
        snapshot = take_snapshot(read_folder(tmp_path))
        collector.publish(snapshot, examine(snapshot, after_s=5))
        for path in ("metrics", "secret/metrics"):
            text = urllib.request.urlopen(f"{base}/{path}").read().decode()
            assert 'unickpt_rank_step{job_name="llama",rank="1"} 20.0' in text
            verdict = (
                f'at="",cause="compute",hardware="",host="{socket.gethostname()}",job_name="llama",next="LooksAtProcess",'
                'rank="2",syndrome="non-communication hang"'
            )
            assert f"unickpt_verdict_since_timestamp_seconds{{{verdict}}} " in text
            assert f"unickpt_verdicts{{{verdict}}} 1.0" in text
            assert 'unickpt_collectives_total{group="data parallel",job_name="llama"} 3.0' in text
            assert [line for line in text.splitlines() if line[0] != "#" and 'job_name="llama"' not in line] == []
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/verdicts")
    finally:
        server.shutdown()
        server.server_close()


def test_diagnose_asks_an_agent(tmp_path: Path, served: tuple[Collector, str], capsys: pytest.CaptureFixture[str]) -> None:
    collector, address = served
    hung(tmp_path)
    Agent(tmp_path, print, collector).look(read_folder(tmp_path))
    assert main(["diagnose", address, "--after", "5"]) == 1
    launch.write_address(tmp_path, address)
    assert main(["diagnose", str(tmp_path / launch.ADDRESS), "--after", "5"]) == 1  # no secret on a command line
    assert "rank 2 has not entered" in " ".join(capsys.readouterr().out.split())
    assert main(["diagnose", "http://127.0.0.1:9/x"]) == 2
    assert "no agent answers there" in capsys.readouterr().err
    assert main(["diagnose", "ftp://127.0.0.1/x"]) == 2


def test_only_the_owner_can_read_the_address(tmp_path: Path) -> None:
    launch.write_address(tmp_path, "http://127.0.0.1:1/s")
    assert launch.read_address(tmp_path) == "http://127.0.0.1:1/s"
    assert (tmp_path / launch.ADDRESS).stat().st_mode & 0o077 == 0


def test_an_answer_names_only_existing_ranks(tmp_path: Path) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    found = examine(snapshot, after_s=5)
    texts = render_all(found.verdicts, snapshot)
    assert server.answer(found, texts, snapshot).ask == [0, 1, 2, 3]  # who waits is asked where it waits
    others = dataclasses.replace(snapshot, ranks={rank: one for rank, one in snapshot.ranks.items() if rank != 2})
    assert server.answer(found, texts, others) == server.AgentReply([0, 1, 3])


def test_prometheus_is_answered_where_it_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    """Metrics are served on this host only, unless ``metrics_address`` is set."""
    from unickpt.base.options.job import TimingOptions

    assert TimingOptions().metrics_address == "127.0.0.1"
    port, current = free_port(), (Collector(), "secret")
    assert server.answer_prometheus(lambda: current, Scrape(0, "127.0.0.2"), notice) is None
    server.answer_prometheus(lambda: current, Scrape(port, "127.0.0.2"), notice)
    assert not capfd.readouterr().err
    for host, answers in (("127.0.0.2", True), ("127.0.0.1", False)):
        with contextlib.closing(socket.socket()) as client:
            assert (client.connect_ex((host, port)) == 0) is answers
    server.answer_prometheus(lambda: current, Scrape(port, "no such\x1b[2J"), notice)
    told = capfd.readouterr().err
    assert told.count("Prometheus is not answered on ") == 1
    assert "answered on no such\\x1b[2J" in told
