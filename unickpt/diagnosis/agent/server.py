"""HTTP server on rank 0's host that collects the snapshots of all hosts.

    POST <address>/snapshot    send a host's snapshot; the response asks for stacks and holds verdicts on its ranks
    GET  <address>/snapshot    the snapshot of the job
    GET  <address>/verdicts    the newest verdicts
    GET  <address>/metrics     metrics for Prometheus (needs the extra ``metrics``)

The address contains a secret that only processes of the job know.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from socket import socket
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from unickpt.base.errors import ConfigError, FormatError
from unickpt.base.limited_http import ConnectionLimits, LimitedHandler, LimitedServer, exchange
from unickpt.base.memory_status import MemoryStatus
from unickpt.base.prometheus import OpenPort, Scrape, open_port
from unickpt.base.witness_notes import WitnessNote
from unickpt.diagnosis.detectors.examine import Examination
from unickpt.diagnosis.reports.verdict_line import parse_line
from unickpt.diagnosis.reports.verdict_text import VerdictText, as_json, render_all
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import Snapshot

LARGEST = 64 << 20  # bytes of a snapshot
_DIGITS = 12  # of a length that is looked at
_COUNT_DIGITS = 24
_ASKED = 64  # ranks at fault of one verdict whose stacks are asked for
_ANSWER, _LINES = 1 << 20, 64  # bytes, and lines, of an answer to an agent
_TIMEOUT_S, _SEND_S, _FETCH_S = 5.0, 10.0, 60.0  # of one read, and of whole exchanges
_SCHEMES: dict[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}
_LIMITS = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class Notice:
    """A verdict as it is written to a log.

    Attributes:
        key: ``Verdict.key``: a verdict that stays is not written at every look.
        text: machine-readable line and sentence.
    """

    key: str
    text: VerdictText


@dataclass(frozen=True, slots=True)
class AgentReply:
    """Answer to the agent of another host.

    Attributes:
        ask: ranks whose stacks are wanted.
        notices: verdicts on ranks of that host, to be written to its log.
    """

    ask: list[int] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


class Collector:
    """Snapshots of all hosts and the newest verdicts. Thread-safe.

    Args:
        key: key that authenticates the snapshots of other hosts; empty: the secret in the address is enough.
        labels: labels of all metrics.

    Attributes:
        labels: the same. May be set later.
    """

    def __init__(self, key: bytes = b"", labels: Mapping[str, str] = MappingProxyType({})) -> None:
        self.labels = labels
        self._lock = threading.Lock()
        self._key = key
        self._counts: dict[str, int] = {}
        self._snapshots: dict[str, tuple[Snapshot, float]] = {}
        self._job: Snapshot | None = None
        self._found = Examination([], 0.0)
        self._texts: list[VerdictText] = []
        self._memory: MemoryStatus | None = None
        self._notes: Sequence[WitnessNote] = ()
        self._measuring = threading.Lock()
        self._measured: tuple[Snapshot, tuple[int, bytes]] | None = None

    def authentic(self, secret: str, agent: str, count: str, mac: str, body: bytes) -> bool:
        """Return whether an agent of the job has sent this body, and has not sent it before.

        Args:
            secret: secret in the address.
            agent: name of the sender.
            count: number of the message, which increases.
            mac: its authentication code, as from ``mac_of``.
            body: bytes of the message.
        """
        if not self._key:
            return True
        expected = mac_of(self._key, secret, agent, count, body)
        if not (count.isascii() and count.isdecimal()) or not hmac.compare_digest(mac.encode(), expected.encode()):
            return False
        with self._lock:
            fresh = int(count) > self._counts.get(agent, -1)
            if fresh:
                self._counts[agent] = int(count)
            return fresh

    def named(self) -> list[tuple[str, Snapshot, float]]:
        """Return the newest snapshots of the other hosts, each with the name of its agent and its age in seconds."""
        now = time.monotonic()
        with self._lock:
            return [(name, snapshot, now - at) for name, (snapshot, at) in self._snapshots.items()]

    def take(self, agent: str, snapshot: Snapshot) -> AgentReply:
        """Store the snapshot of another host and return the answer to its agent."""
        with self._lock:
            self._snapshots[agent] = (snapshot, time.monotonic())
            return answer(self._found, self._texts, snapshot)

    def others(self) -> list[tuple[Snapshot, float]]:
        """Return the newest snapshots of the other hosts, each with its age in seconds."""
        return [(snapshot, age_s) for _, snapshot, age_s in self.named()]

    def publish(
        self, job: Snapshot, found: Examination, memory: MemoryStatus | None = None, notes: Sequence[WitnessNote] = ()
    ) -> None:
        """Publish the snapshot of the job, the verdicts on it, the state of its memory tier, and what its witness has found."""
        texts = render_all(found.verdicts, job)
        with self._lock:
            self._job, self._found, self._texts, self._memory, self._notes = job, found, texts, memory, notes

    def job(self) -> Snapshot | None:
        """Return the published snapshot."""
        with self._lock:
            return self._job

    def metrics(self) -> tuple[int, bytes]:
        """Return an HTTP status and the metrics of the job in Prometheus' text format."""
        from unickpt.diagnosis.reports.metrics import exposition, labelled, live_measurements

        with self._measuring:  # computed once per look
            with self._lock:
                job, found, memory, notes = self._job, self._found, self._memory, self._notes
            if job is None:
                return 503, b"no data of the job yet\n"
            if self._measured is None or self._measured[0] is not job:
                try:
                    measured = labelled(live_measurements(job, found.verdicts, memory, notes), self.labels)
                    answer = 200, exposition(measured).encode(errors="backslashreplace")
                except ConfigError as err:
                    answer = 501, f"{err}\n".encode()
                self._measured = job, answer
            return self._measured[1]

    def verdicts(self) -> dict[str, Any]:
        """Return the published verdicts as JSON types."""
        with self._lock:
            return {"deadline_s": self._found.deadline_s, "verdicts": as_json(self._found.verdicts, self._texts)}


Current = Callable[[], tuple[Collector, str]]


def answer(found: Examination, texts: Sequence[VerdictText], snapshot: Snapshot) -> AgentReply:
    """Return what the agent with the ranks of ``snapshot`` needs to know of the verdicts."""
    about = [
        (rank, Notice(verdict.key, text))
        for verdict, text in zip(found.verdicts, texts, strict=True)
        for rank in verdict.ranks
        if rank in snapshot.ranks
    ]
    asked = {rank for verdict in found.verdicts for rank in (*verdict.ranks[:_ASKED], *verdict.waiting)}
    return AgentReply(sorted(asked.intersection(snapshot.ranks)), list(dict.fromkeys(notice for _, notice in about)))


def serve(
    current: Current,
    listener: socket,
    *,
    open_metrics: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    limits: ConnectionLimits = _LIMITS,
) -> LimitedServer:
    """Serve in background threads until ``shutdown``.

    Args:
        current: returns the source of the answers, and the secret, which is the first part of all paths.
        listener: bound, listening socket.
        open_metrics: whether ``/metrics`` needs no secret.
        tell: writes a line to the log about refused connections.
        limits: limits of connections.
    """

    class CollectorHandler(LimitedHandler):
        def do_POST(self) -> None:  # noqa: N802  (name required by http.server)
            hub, key = current()
            length = self.headers.get("Content-Length", "")
            if not self._is_for("snapshot", key):
                return self._refuse()
            if not length.isdecimal() or len(length) > _DIGITS or int(length) > LARGEST:
                return self.reply(413, b"")
            agent, body = self.headers.get("Unickpt-Agent", "")[:512], self.rfile.read(int(length))
            count, mac = self.headers.get("Unickpt-Count", "")[:_COUNT_DIGITS], self.headers.get("Unickpt-Mac", "")[:128]
            if not hub.authentic(key, agent, count, mac, body):
                return self._refuse()
            try:
                snapshot = decode_snapshot(body)
            except FormatError as err:
                return self.reply(400, str(err).encode(errors="backslashreplace"))
            said = hub.take(agent, snapshot)
            return self.reply(
                200,
                json.dumps({"ask": said.ask, "notices": [[n.key, *astuple(n.text)] for n in said.notices]}).encode(),
            )

        def do_GET(self) -> None:  # noqa: N802
            hub, key = current()
            if self._is_for("verdicts", key):
                return self.reply(200, json.dumps(hub.verdicts()).encode())
            if self._is_for("metrics", key) or (open_metrics and self.path == "/metrics"):
                return self.reply(*hub.metrics())
            if not self._is_for("snapshot", key):
                return self._refuse()
            job = hub.job()
            return self.reply(200, encode_snapshot(job)) if job is not None else self.reply(404, b"")

        def _is_for(self, name: str, key: str) -> bool:
            found = bool(key) and hmac.compare_digest(self.path.encode(), f"/{key}/{name}".encode())
            if found:
                self.server.knows(self.request)
            return found

        def _refuse(self) -> None:
            self.server.stranger(self.client_address)
            self.reply(404, b"")

    server = LimitedServer(listener, CollectorHandler, tell, limits)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def answer_prometheus(current: Current, scrape: Scrape, tell: Callable[[str], None]) -> OpenPort | None:
    """Serve ``/metrics`` without the secret, if that is asked for. ``tell`` a person what is not as asked. See ``serve``."""
    port = open_port(scrape, tell) if scrape.port else None
    if port is not None:
        serve(current, port.listener, open_metrics=True, tell=tell)
    return port


def secret_of(address: str) -> str:
    """Return the secret in an address."""
    return urlsplit(address).path.strip("/")


def mac_of(key: bytes, secret: str, agent: str, count: str, body: bytes) -> str:
    """Return the authentication code of a message: a recorded message is of no use at another address or a second time."""
    head = f"snapshot {secret} {agent} {count} ".encode()
    return hmac.new(key, head + hashlib.sha256(body).digest(), hashlib.sha256).hexdigest()


def send(address: str, agent: str, snapshot: Snapshot, key: bytes = b"") -> AgentReply:
    """Send a host's snapshot, authenticated if there is a key.

    Raises:
        OSError: the server cannot be reached, or refuses the snapshot.
        FormatError: the response is invalid.
    """
    body, head = encode_snapshot(snapshot), {"Unickpt-Agent": quote(agent)}
    if key:
        count = str(time.monotonic_ns())
        head |= {"Unickpt-Count": count, "Unickpt-Mac": mac_of(key, secret_of(address), quote(agent), count, body)}
    reply = _asked(f"{address}/snapshot", body, head, most_bytes=_ANSWER, within_s=_SEND_S)
    try:
        said = json.loads(reply)
        notices = [_notice(*fields) for fields in said["notices"][:_LINES]]
        return AgentReply([int(rank) for rank in said["ask"]], notices)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise FormatError(f"{_without_secret(address)}: not the answer of an agent ({err})") from err


def _notice(key: Any, line: Any, *texts: Any) -> Notice:
    """Check a notice from the network: its line must be the line of a verdict."""
    sentence, then, command, since = (str(each) for each in (*texts, "", "", "")[:4])
    return Notice(str(key), VerdictText(str(parse_line(str(line))), sentence, then, command, since))


def fetch(address: str) -> Snapshot:
    """Return the snapshot of the job from the agent at an address.

    Raises:
        OSError: the agent cannot be reached, or has no snapshot yet.
        FormatError: the response is invalid.
    """
    return decode_snapshot(_asked(f"{address.rstrip('/')}/snapshot", None, {}, most_bytes=LARGEST, within_s=_FETCH_S))


def _asked(url: str, data: bytes | None, headers: dict[str, str], *, most_bytes: int, within_s: float) -> bytes:
    """Return the body of a response. Redirects and proxies are not used: traffic stays inside the cluster."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ValueError("not http://...")
        connection = _SCHEMES[parts.scheme](parts.hostname, parts.port, timeout=_TIMEOUT_S)
    except ValueError as err:
        raise FormatError(f"{_without_secret(url)}: not an address of an agent (http://...): {err}") from err
    try:
        method = "GET" if data is None else "POST"
        status, body = exchange(connection, method, parts.path, data, headers, most_bytes + 1, within_s)
    except http.client.HTTPException as err:
        raise FormatError(f"{_without_secret(url)}: no agent answers there ({type(err).__name__})") from err
    if status != 200:
        raise ConnectionError(f"HTTP status {status}")
    if len(body) > most_bytes:
        raise FormatError(f"{_without_secret(url)}: the answer has more than {most_bytes} bytes")
    return body


def _without_secret(url: str) -> str:
    """Return an address without its secret, for messages."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/..."
