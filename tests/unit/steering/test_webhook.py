"""Alerts to a real web server on this machine, and to servers that do what they should not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.steering.made import running
from tests.unit.steering.peers import until
from unickpt.base.errors import ConfigError
from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.publishing.observers import Observers
from unickpt.steering.publishing.webhook import MOST, TIMEOUT_S, Webhook, checked_url, post
from unickpt.steering.state.membership import Left, Lost, Ordered, Park
from unickpt.steering.state.transitions import transition


class Receiver(ThreadingHTTPServer):
    """Web server that keeps what it gets, and answers with ``status``."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.gate = threading.Event()
        self.gate.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.gate.wait(30)
                receiver.got.append((self.path, json.loads(body)))
                self.send_response(status)
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                receiver.got.append((self.path, {}))

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    server = Receiver(getattr(request, "param", 200))
    yield server
    server.shutdown()
    server.server_close()


def observers(url: str, tmp_path: Path, **more: Any) -> Observers:
    made = Observers(SteeringOptions(webhook=url, history=str(tmp_path / "history"), **more), "secret job")
    made.leads = lambda: True
    return made


def events(made: Observers) -> None:
    """An order because of a verdict that is reported twice, a lost host, and the end of the job."""
    state = running(4)
    made.chronicle.changed(None, state)
    report = HubReport((1, 1), 5, 0.0, (Finding(Fault.STOPPED, ("h1",), 60.0, text="rank 1 is stopped", ranks=(1,)),))
    made.chronicle.reported(report)
    made.chronicle.reported(report)
    for change in (
        [Ordered("x", "park h1 for 300 s: STOPPED_OUT", (1,), "park", "STOPPED_OUT"), Park("h1", "STOPPED_OUT", 300.0)],
        [Ordered("y", "not executed (act=false): restart", (), "", "PROGRAM")],
        [Left("h0", "1", failed="E"), Lost("h2", "1"), Left("h3", "1", failed="E")],
    ):
        before = state
        for event in change:
            state = transition(state, event, 0.0)  # type: ignore[arg-type]
        made.chronicle.changed(before, state)


def test_orders_verdicts_and_the_end_are_posted_once(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{receiver.url}/hooks/T123?x=1\n")
    made = observers(str(tmp_path / "url"), tmp_path)
    events(made)
    made.close()
    assert {path for path, _ in receiver.got} == {"/hooks/T123?x=1"}
    found = [alert for _, alert in receiver.got]
    assert [alert["kind"] for alert in found] == ["verdict", "order", "round_ended", "order", "closed"]
    assert found[0] | {"at": 0} == {
        "schema": 1, "kind": "verdict", "job": "", "round": "1.1", "at": 0, "fault": "stopped", "hosts": ["h1"], "ranks": [1],
        "text": "unickpt: verdict: rank 1 is stopped",
    }  # fmt: skip
    assert (found[1]["action"], found[1]["executed"], found[1]["cause"]) == ("park", True, "STOPPED_OUT")
    assert found[1]["text"] == "unickpt: order: park h1 for 300 s: STOPPED_OUT"
    assert (found[2]["cause"], found[3]["executed"], found[4]["finished"]) == ("host parked", False, False)
    assert "secret job" not in json.dumps(found), "without secret_file the name of the job is its secret"


def test_only_the_leader_posts(receiver: Receiver, tmp_path: Path) -> None:
    made = observers(receiver.url, tmp_path)
    made.leads = lambda: False
    events(made)
    made.close()
    assert receiver.got == []


@pytest.mark.parametrize("receiver", [302, 500], indirect=True)
def test_redirects_are_not_followed_and_failures_are_counted_and_logged_once(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = observers(f"{receiver.url}/secret-path", tmp_path)
    events(made)
    made.close()
    assert [path for path, _ in receiver.got] == ["/secret-path"] * 5
    assert made._webhook is not None
    assert made._webhook.outbox.failures == 5
    assert caplog.text.count("an alert to http://127.0.0.1 failed (failure 1). Training is not affected") == 1
    assert "secret-path" not in caplog.text


def test_a_slow_server_never_delays_and_the_queue_is_bounded(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.gate.clear()
    hook = Webhook(checked_url(receiver.url), "job", lambda: True)
    began_s = time.monotonic()
    for number in range(3 * MOST):
        finding = Finding(Fault.STOPPED, (f"h{number}",), 60.0, text="x")
        hook.reported(HubReport((1, 1), 5, 0.0, (finding,)), 0.0)
    assert time.monotonic() - began_s < TIMEOUT_S  # of the first exchange, which nobody answers
    until(lambda: hook.outbox.dropped >= 2 * MOST - 1)
    assert caplog.text.count("wait already, so one is dropped") == 2  # the first and the hundredth
    receiver.gate.set()
    until(lambda: len(receiver.got) >= MOST)


def test_servers_that_never_answer_or_do_not_exist_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unickpt.steering.publishing.webhook.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            post(checked_url(f"http://127.0.0.1:{silent.getsockname()[1]}"), b"{}")
        assert time.monotonic() - began_s < 5
        with pytest.raises(OSError, match=r"timed out|SSL"):  # no TLS there
            post(checked_url(f"https://127.0.0.1:{silent.getsockname()[1]}"), b"{}")
        port = silent.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        post(checked_url(f"http://127.0.0.1:{port}"), b"{}")


@pytest.mark.parametrize(
    "url",
    ["ftp://host/x", "file:///etc/passwd", "http://", "http:///x", "https://user:pw@host/x", "http://host:99999/",
     "http://h/a b", "http://h/\r\nX: y", "/no/such/file", "gopher://h"],
)  # fmt: skip
def test_other_urls_are_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-conf webhook"):
        checked_url(url)
