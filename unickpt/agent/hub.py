"""Where the agents of a job come together: HTTP on rank 0's host.

    POST <address>/view        a host's view; the answer says what is wanted of its ranks and what to tell there
    GET  <address>/view        the whole job, as bytes of a view
    GET  <address>/verdicts    the newest verdicts
    GET  <address>/metrics     measurements for Prometheus (which needs the extra ``metrics``)

The address has a secret in it that only processes of the job know.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any
from urllib.parse import urlsplit

from unickpt.diagnosis.examining import Examination
from unickpt.diagnosis.view import View
from unickpt.diagnosis.wire import packed, unpacked
from unickpt.errors import ConfigError, FormatError

LARGEST = 64 << 20  # bytes of a view
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """To an agent.

    Attributes:
        ask: ranks whose stacks are wanted.
        lines: to be told in the log of this host: what concerns its ranks.
    """

    ask: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Hub:
    """Takes what the agents send, and answers them. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, tuple[View, float]] = {}
        self._job: View | None = None
        self._found = Examination([], [], 0.0)

    def take(self, agent: str, view: View) -> Answer:
        """A view of another host has come."""
        with self._lock:
            self._views[agent] = (view, time.monotonic())
            return answer(self._found, view)

    def others(self) -> list[tuple[View, float]]:
        """The newest views of the other hosts, each with its age in seconds."""
        now = time.monotonic()
        with self._lock:
            return [(view, now - at) for view, at in self._views.values()]

    def publish(self, job: View, found: Examination) -> None:
        """What is known of the whole job now."""
        with self._lock:
            self._job, self._found = job, found

    def job(self) -> View | None:
        """As it was published."""
        with self._lock:
            return self._job

    def metrics(self) -> tuple[int, bytes]:
        """An HTTP status, and measurements of the job in Prometheus' text format."""
        from unickpt.views.live import live
        from unickpt.views.metrics import exposition

        with self._lock:
            job, found = self._job, self._found
        if job is None:
            return 503, b"nothing is known of the job yet\n"
        try:
            return 200, exposition(live(job, found.verdicts)).encode()
        except ConfigError as err:
            return 501, f"{err}\n".encode()

    def verdicts(self) -> dict[str, Any]:
        """As they were published."""
        with self._lock:
            return {"deadline_s": self._found.deadline_s, "lines": self._found.lines}


def answer(found: Examination, view: View) -> Answer:
    """What the agent of some ranks has to know of the verdicts."""
    about = [
        (rank, line)
        for verdict, line in zip(found.verdicts, found.lines, strict=True)
        for rank in verdict.ranks
        if rank in view.ranks
    ]
    return Answer(sorted({rank for rank, _ in about}), list(dict.fromkeys(line for _, line in about)))


def serve(hub: Hub, listener: socket, secret: str, *, open_metrics: bool = False) -> ThreadingHTTPServer:
    """Answer in threads of their own, until ``shutdown``.

    Args:
        hub: what is asked.
        listener: bound and listening.
        secret: first part of all paths.
        open_metrics: answer ``/metrics`` to whoever asks.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not self._is_for("view") or not length.isdecimal() or int(length) > LARGEST:
                return self._reply(404, b"")
            try:
                view = unpacked(self.rfile.read(int(length)))
            except FormatError as err:
                return self._reply(400, str(err).encode())
            said = hub.take(self.headers.get("Unickpt-Agent", "")[:256], view)
            return self._reply(200, json.dumps({"ask": said.ask, "lines": said.lines}).encode())

        def do_GET(self) -> None:
            if self._is_for("verdicts"):
                return self._reply(200, json.dumps(hub.verdicts()).encode())
            if self._is_for("metrics") or (open_metrics and self.path == "/metrics"):
                return self._reply(*hub.metrics())
            job = hub.job() if self._is_for("view") else None
            return self._reply(200, packed(job)) if job is not None else self._reply(404, b"")

        def _is_for(self, name: str) -> bool:
            return hmac.compare_digest(self.path.encode(), f"/{secret}/{name}".encode())

        def _reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing of it belongs into a training log."""

    server = ThreadingHTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def secret_of(address: str) -> str:
    """The last part of it."""
    return urlsplit(address).path.strip("/")


def send(address: str, agent: str, view: View) -> Answer:
    """Send a host's view.

    Raises:
        OSError: the hub cannot be reached, or does not want it.
        FormatError: it answers something else.
    """
    request = urllib.request.Request(f"{address}/view", packed(view), {"Unickpt-Agent": agent})
    with _open(request) as reply:
        try:
            said = json.loads(reply.read(LARGEST))
            return Answer([int(rank) for rank in said["ask"]], [str(line) for line in said["lines"]])
        except (ValueError, KeyError, TypeError) as err:
            raise FormatError(f"{address}: not the answer of an agent ({err})") from err


def fetch(address: str) -> View:
    """The whole job, as the agent at an address knows it.

    Raises:
        OSError: it cannot be reached, or has nothing yet.
        FormatError: it answers something else.
    """
    with _open(urllib.request.Request(f"{address.rstrip('/')}/view")) as reply:
        return unpacked(reply.read(LARGEST))


def _open(request: urllib.request.Request) -> Any:
    if urlsplit(request.full_url).scheme not in ("http", "https"):
        raise FormatError(f"{request.full_url}: not an address of an agent (http://...)")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # inside of a cluster
    return opener.open(request, timeout=_TIMEOUT_S)
