"""Where the agents of a job come together: HTTP on rank 0's host.

    POST <address>/view        a host's view; the answer says what is wanted of its ranks and what to tell there
    GET  <address>/view        the whole job, as bytes of a view
    GET  <address>/verdicts    the newest verdicts
    GET  <address>/metrics     measurements for Prometheus (which needs the extra ``metrics``)

The address has a secret in it that only processes of the job know.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import quote, urlsplit

from unickpt.agent.serving import Handler, Limits, Server
from unickpt.diagnosis.examining import Examination
from unickpt.diagnosis.view import View
from unickpt.diagnosis.wire import packed, unpacked
from unickpt.errors import ConfigError, FormatError

LARGEST = 64 << 20  # bytes of a view
_DIGITS = 12  # of a length that is looked at
_ANSWER, _LINES = 1 << 20, 64  # bytes, and lines, of an answer to an agent
_TIMEOUT_S, _SEND_S, _FETCH_S = 5.0, 10.0, 60.0  # of one read, and of whole exchanges
_SCHEMES: dict[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}
_LIMITS = Limits()


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
        self._measuring = threading.Lock()
        self._measured: tuple[View, tuple[int, bytes]] | None = None

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

        with self._measuring:  # once for all who ask between two looks
            with self._lock:
                job, found = self._job, self._found
            if job is None:
                return 503, b"nothing is known of the job yet\n"
            if self._measured is None or self._measured[0] is not job:
                try:
                    answer = 200, exposition(live(job, found.verdicts)).encode(errors="backslashreplace")
                except ConfigError as err:
                    answer = 501, f"{err}\n".encode()
                self._measured = job, answer
            return self._measured[1]

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


def serve(
    hub: Hub,
    listener: socket,
    secret: str,
    *,
    open_metrics: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    limits: Limits = _LIMITS,
) -> Server:
    """Answer in threads of their own, until ``shutdown``.

    Args:
        hub: what is asked.
        listener: bound and listening.
        secret: first part of all paths.
        open_metrics: answer ``/metrics`` to whoever asks.
        tell: a line for the log, now and then: how many connections were refused.
        limits: of connections.
    """

    class HubHandler(Handler):
        def do_POST(self) -> None:  # noqa: N802  (http.server calls it so)
            length = self.headers.get("Content-Length", "")
            if not self._is_for("view"):
                return self._refuse()
            if not length.isdecimal() or len(length) > _DIGITS or int(length) > LARGEST:
                return self.reply(413, b"")
            try:
                view = unpacked(self.rfile.read(int(length)))
            except FormatError as err:
                return self.reply(400, str(err).encode(errors="backslashreplace"))
            said = hub.take(self.headers.get("Unickpt-Agent", "")[:512], view)
            return self.reply(200, json.dumps({"ask": said.ask, "lines": said.lines}).encode())

        def do_GET(self) -> None:  # noqa: N802
            if self._is_for("verdicts"):
                return self.reply(200, json.dumps(hub.verdicts()).encode())
            if self._is_for("metrics") or (open_metrics and self.path == "/metrics"):
                return self.reply(*hub.metrics())
            if not self._is_for("view"):
                return self._refuse()
            job = hub.job()
            return self.reply(200, packed(job)) if job is not None else self.reply(404, b"")

        def _is_for(self, name: str) -> bool:
            found = hmac.compare_digest(self.path.encode(), f"/{secret}/{name}".encode())
            if found:
                self.server.knows(self.request)
            return found

        def _refuse(self) -> None:
            self.server.stranger(self.client_address)
            self.reply(404, b"")

    server = Server(listener, HubHandler, tell, limits)
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
    reply = _asked(f"{address}/view", packed(view), {"Unickpt-Agent": quote(agent)}, most_bytes=_ANSWER, within_s=_SEND_S)
    try:
        said = json.loads(reply)
        return Answer([int(rank) for rank in said["ask"]], [str(line) for line in said["lines"][:_LINES]])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise FormatError(f"{_without_secret(address)}: not the answer of an agent ({err})") from err


def fetch(address: str) -> View:
    """The whole job, as the agent at an address knows it.

    Raises:
        OSError: it cannot be reached, or has nothing yet.
        FormatError: it answers something else.
    """
    return unpacked(_asked(f"{address.rstrip('/')}/view", None, {}, most_bytes=LARGEST, within_s=_FETCH_S))


def _asked(url: str, data: bytes | None, headers: dict[str, str], *, most_bytes: int, within_s: float) -> bytes:
    """The body of an answer. Redirections are not followed and no proxy is asked: this stays inside of a cluster."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ValueError("not http://...")
        connection = _SCHEMES[parts.scheme](parts.hostname, parts.port, timeout=_TIMEOUT_S)
    except ValueError as err:
        raise FormatError(f"{_without_secret(url)}: not an address of an agent (http://...): {err}") from err
    with contextlib.closing(connection):
        connection.connect()
        line = connection.sock
        clock = threading.Timer(within_s, _end, [line])  # a time-out is of a single read: one that drips would never end
        clock.daemon = True
        clock.start()
        try:
            connection.request("GET" if data is None else "POST", parts.path, data, headers)
            with connection.getresponse() as reply:
                body = reply.read(most_bytes + 1)
        except http.client.HTTPException as err:
            raise FormatError(f"{_without_secret(url)}: no agent answers there ({type(err).__name__})") from err
        finally:
            clock.cancel()
    if reply.status != 200:
        raise ConnectionError(f"HTTP status {reply.status}")
    if len(body) > most_bytes:
        raise FormatError(f"{_without_secret(url)}: the answer has more than {most_bytes} bytes")
    return body


def _end(line: socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(SHUT_RDWR)


def _without_secret(url: str) -> str:
    """For a message, which may end in a log."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/..."
