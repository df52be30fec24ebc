"""Agents of several hosts are one: who is asked, who is answered, and with what."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.made import hung
from tests.launch import free_port
from unickpt.agent import hub as hubs
from unickpt.agent import starting
from unickpt.agent.hub import Hub, fetch, secret_of, send, serve
from unickpt.agent.watching import Agent
from unickpt.cli.main import main
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.view import view_of
from unickpt.timing.folder import read_folder
from unickpt.timing.processes import State
from unickpt.timing.ring import SUFFIX


@pytest.fixture
def served() -> Iterator[tuple[Hub, str]]:
    hub = Hub()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
    server = serve(hub, listener, secret_of(address))
    yield hub, address
    server.shutdown()
    server.server_close()


def split(tmp_path: Path, since_s: float = 30) -> tuple[Path, Path]:
    """The rings of a hung job on two hosts; rank 2 is on the second one."""
    hung(tmp_path / "a", since_s=since_s)
    (tmp_path / "b").mkdir()
    for rank in (2, 3):
        (tmp_path / "a" / f"{rank:05d}{SUFFIX}").rename(tmp_path / "b" / f"{rank:05d}{SUFFIX}")
    return tmp_path / "a", tmp_path / "b"


def looked_at_by_two(tmp_path: Path, served: tuple[Hub, str], since_s: float) -> tuple[Path, Path, str, dict[str, list[str]]]:
    """Both folders of a job that has hung for so long, the hub's address, and what each agent has told."""
    hub, address = served
    first, second = split(tmp_path, since_s)
    lines: dict[str, list[str]] = {"a": [], "b": []}
    agents = Agent(first, lines["a"].append, hub), Agent(second, lines["b"].append, address=lambda: address)
    for _ in range(2):
        agents[1].look(read_folder(second))
        agents[0].look(read_folder(first))
    agents[1].look(read_folder(second))
    return first, second, address, lines


def test_two_agents_are_one_view(tmp_path: Path, served: tuple[Hub, str]) -> None:
    _, _, address, lines = looked_at_by_two(tmp_path, served, since_s=30)
    # with 4 ranks and no steps, 120 s are allowed
    assert lines == {"a": [], "b": []}
    job = fetch(address)
    assert sorted(job.ranks) == [0, 1, 2, 3]
    (verdict,) = examine(job, after_s=5).verdicts
    assert verdict.ranks == (2,)


def test_the_agent_of_the_culprit_tells_it_too(tmp_path: Path, served: tuple[Hub, str]) -> None:
    first, _, address, lines = looked_at_by_two(tmp_path, served, since_s=130)
    assert len(lines["a"]) == len(lines["b"]) == 1  # once, not at every look
    assert "rank 2 has not entered all_reduce #3" in lines["b"][0]
    (noted,) = [json.loads(line) for line in (first / "verdicts.jsonl").read_text().splitlines()]
    assert (noted["ranks"], noted["syndrome"]) == ([2], "non-communication hang")
    verdicts = json.loads(urllib.request.urlopen(f"{address}/verdicts").read())
    assert verdicts["lines"][0].startswith("rank 2")


def test_alone_an_agent_tells_nothing_of_others(tmp_path: Path) -> None:
    hung(tmp_path / "a", since_s=130)
    (tmp_path / "a" / f"00002{SUFFIX}").unlink()
    lines: list[str] = []
    Agent(tmp_path / "a", lines.append, address=lambda: "http://127.0.0.1:9/gone").look(read_folder(tmp_path / "a"))
    assert lines == []


def test_a_host_that_is_silent_is_unknown(tmp_path: Path, served: tuple[Hub, str], monkeypatch: pytest.MonkeyPatch) -> None:
    hub, address = served
    first, second = split(tmp_path)
    send(address, "b", view_of(read_folder(second)))
    monkeypatch.setattr("unickpt.agent.watching._SILENT_S", -1.0)
    Agent(first, print, hub).look(read_folder(first))
    job = fetch(address)
    assert {rank: one.state for rank, one in job.ranks.items()}[2] is State.UNKNOWN
    assert any("nothing was heard of" in problem for problem in job.problems)


@pytest.mark.parametrize("path", ["view", "other/view", "secret", "secret/", "secret/../view", "secret/else"])
def test_only_who_knows_the_address_is_answered(served: tuple[Hub, str], path: str) -> None:
    base = served[1].rpartition("/")[0]
    for data in (None, b"x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/{path}", data)
        assert refused.value.code == 404


def test_what_is_no_view_is_refused_by_the_hub(served: tuple[Hub, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served[1]}/view", b"nonsense")
    assert refused.value.code == 400
    assert served[0].others() == []


def test_prometheus_is_answered(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    hung(tmp_path)
    hub = Hub()
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = serve(hub, listener, "secret", open_metrics=True)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/metrics")
        assert refused.value.code == 503
        view = view_of(read_folder(tmp_path))
        hub.publish(view, examine(view, after_s=5))
        for path in ("metrics", "secret/metrics"):
            text = urllib.request.urlopen(f"{base}/{path}").read().decode()
            assert 'unickpt_rank_step{rank="1"} 20.0' in text
            assert 'unickpt_verdicts{rank="2",syndrome="non-communication hang"} 1.0' in text
            assert 'unickpt_collectives_total{group="data parallel"} 3.0' in text
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/verdicts")
    finally:
        server.shutdown()
        server.server_close()


def test_diagnose_asks_an_agent(tmp_path: Path, served: tuple[Hub, str], capsys: pytest.CaptureFixture[str]) -> None:
    hub, address = served
    hung(tmp_path)
    Agent(tmp_path, print, hub).look(read_folder(tmp_path))
    assert main(["diagnose", address, "--after", "5"]) == 1
    starting.write_address(tmp_path, address)
    assert main(["diagnose", str(tmp_path / starting.ADDRESS), "--after", "5"]) == 1  # no secret on a command line
    assert "rank 2 has not entered" in " ".join(capsys.readouterr().out.split())
    assert main(["diagnose", "http://127.0.0.1:9/x"]) == 2
    assert "no agent answers there" in capsys.readouterr().err
    assert main(["diagnose", "ftp://127.0.0.1/x"]) == 2


def test_the_address_is_its_owners_alone(tmp_path: Path) -> None:
    starting.write_address(tmp_path, "http://127.0.0.1:1/s")
    assert starting.read_address(tmp_path) == "http://127.0.0.1:1/s"
    assert (tmp_path / starting.ADDRESS).stat().st_mode & 0o077 == 0


def test_an_answer_is_about_ranks_that_are_there(tmp_path: Path) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    found = examine(view, after_s=5)
    assert hubs.answer(found, view).ask == [2]
    others = dataclasses.replace(view, ranks={rank: one for rank, one in view.ranks.items() if rank != 2})
    assert hubs.answer(found, others) == hubs.Answer()


def test_prometheus_is_answered_where_it_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    """On this host alone, unless ``metrics_address`` says otherwise."""
    from unickpt.agent.__main__ import _answer_prometheus
    from unickpt.timing.options import TimingOptions

    assert TimingOptions().metrics_address == "127.0.0.1"
    port = free_port()
    assert _answer_prometheus(Hub(), "127.0.0.2", port, "secret")
    for host, answers in (("127.0.0.2", True), ("127.0.0.1", False)):
        with contextlib.closing(socket.socket()) as client:
            assert (client.connect_ex((host, port)) == 0) is answers
    assert not _answer_prometheus(Hub(), "no such\x1b[2J", port, "secret")
    assert not _answer_prometheus(Hub(), "127.0.0.1", 1 << 20, "secret")
    assert "Prometheus is not answered on no such\\x1b[2J" in capfd.readouterr().err
