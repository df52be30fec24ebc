"""HTTP with limits: a server that clients without the secret cannot exhaust, and single requests in limited time.

A connection that has not shown the secret has little time and memory, and gives way to newer ones. Errors are logged at most
once a minute, because the agent's standard error is the training log.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from socket import AF_INET, AF_INET6, SHUT_RDWR, create_server, socket
from typing import Any

_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server.

    Attributes:
        connections: open connections. There are at most twice as many threads.
        head_bytes: bytes of the request line and the headers.
        head_s: seconds until a connection must have shown the secret.
        whole_s: seconds of a connection that has.
    """

    connections: int = 128
    head_bytes: int = 8192
    head_s: float = 5.0
    whole_s: float = 30.0


class RateLimitedLog:
    """Log of repeated errors: the first one at once, then a count at most once a minute. Thread-safe."""

    def __init__(self, tell: Callable[[str], None], what: str, every_s: float = _EVERY_S) -> None:
        self._tell, self._what, self._every_s = tell, what, every_s
        self._lock = threading.Lock()
        self._count, self._last = 0, -every_s

    def note(self, reason: str) -> None:
        """Count one more error with this reason."""
        with self._lock:
            self._count += 1
            now = time.monotonic()
            if now - self._last < self._every_s:
                return
            count, self._count, self._last = self._count, 0, now
        self._tell(f"{self._what}: {count} since the last such line, the last one: {reason}")


@dataclass(slots=True)
class _Connection:
    begin: float
    peer: str
    known: bool = False  # has shown the secret
    cut: bool = False


class LimitedServer(ThreadingHTTPServer):
    """HTTP server on a listening socket.

    Args:
        listener: bound, listening socket.
        handler: handler of requests, derived from ``LimitedHandler``.
        tell: writes a line to the log.
        limits: limits of connections.

    Attributes:
        refused: connections that were refused, cut or ended by an error.
    """

    daemon_threads = True

    def __init__(
        self, listener: socket, handler: type[BaseHTTPRequestHandler], tell: Callable[[str], None], limits: ConnectionLimits
    ) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.limits = limits
        port = listener.getsockname()[1]
        self._errors = RateLimitedLog(
            tell, f"connections to port {port} that were refused or ended early; training is not affected"
        )
        self._lock, self.refused = threading.Lock(), 0
        self._open: dict[int, tuple[Any, _Connection]] = {}  # by id of the socket, the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread if there is room, or if a connection without the secret can give way."""
        with self._lock:
            full = len(self._open) >= self.limits.connections
            oldest = next((entry for entry in self._open.values() if not entry[1].known and not entry[1].cut), None)
            refused = full and (oldest is None or len(self._open) >= 2 * self.limits.connections)
            if not refused:
                self._open[id(request)] = (request, _Connection(time.monotonic(), str(client_address[0])))
        if refused:
            self._refuse(f"too many at a time, from {client_address[0]}")
            self.shutdown_request(request)
            return
        if full and oldest is not None:
            self._cut(*oldest, "too many at a time")
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections whose time is over. Called several times a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                entry
                for entry in self._open.values()
                if now - entry[1].begin > (self.limits.whole_s if entry[1].known else self.limits.head_s)
            ]
        for request, connection in late:
            self._cut(request, connection, "no whole request in time")

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self.refused += 1
        self._errors.note(reason)

    def _cut(self, request: Any, connection: _Connection, reason: str) -> None:
        if connection.cut:
            return
        connection.cut = True
        self._refuse(f"{reason}, from {connection.peer}")
        try:
            request.shutdown(SHUT_RDWR)  # its thread reads the end and closes it
        except OSError:  # it has just ended
            return

    def knows(self, request: Any) -> None:
        """Mark a connection that has shown the secret."""
        with self._lock:
            entry = self._open.get(id(request))
            if entry is not None:
                entry[1].known = True

    def stranger(self, client_address: Any) -> None:
        """Log a refused request without the secret."""
        self._refuse(f"a request without the job's secret, from {client_address[0]}")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error instead of printing a traceback."""
        err = sys.exc_info()[1]
        with self._lock:
            entry = self._open.get(id(request))
        if entry is None or not entry[1].cut:
            self._refuse(f"{type(err).__name__}: {err}, from {client_address[0]}")


def listening_at(address: str, port: int) -> socket:
    """Return a listening socket at an address of IPv4 or IPv6.

    Raises:
        OSError, ValueError, OverflowError: the port cannot be opened.
    """
    return create_server((address, port), family=AF_INET6 if ":" in address else AF_INET)


def exchange(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    most_bytes: int,
    within_s: float,
) -> tuple[int, bytes]:
    """Make one request, and return the status and at most ``most_bytes`` of the body. Redirects and proxies are not used.

    Args:
        connection: to the server, not yet open. It is closed.
        method, path, body, headers: the request.
        most_bytes: limit of the answer.
        within_s: time limit of the whole exchange. Those of the socket apply to single reads only.

    Raises:
        OSError: the server cannot be reached, or does not answer in time.
        HTTPException: what answers is no web server.
    """
    with contextlib.closing(connection):
        connection.connect()
        clock = threading.Timer(within_s, _end, [connection.sock])
        clock.daemon = True
        clock.start()
        try:
            connection.request(method, path, body, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.read(most_bytes)
        finally:
            clock.cancel()


def _end(line: socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(SHUT_RDWR)


class _Head:
    """Stream with a limit for all lines of a request. ``read`` has no limit: its length is checked before."""

    def __init__(self, stream: BufferedIOBase, left_bytes: int) -> None:
        self._stream, self._left = stream, left_bytes
        self.read, self.close = stream.read, stream.close

    def renew(self, left_bytes: int) -> None:
        """Begin the next request of the connection."""
        self._left = left_bytes

    def readline(self, limit: int) -> bytes:
        line = self._stream.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionError("the head of the request is too long")
        return line


class LimitedHandler(BaseHTTPRequestHandler):
    """Handler that logs nothing and limits the size of the head."""

    timeout = 5.0
    server_version, sys_version = "unickpt", ""
    server: LimitedServer

    def setup(self) -> None:
        super().setup()
        head: Any = _Head(self.rfile, self.server.limits.head_bytes)
        self.rfile = head

    def handle_one_request(self) -> None:
        """Handle a request. A connection may have several."""
        head: Any = self.rfile
        head.renew(self.server.limits.head_bytes)
        super().handle_one_request()

    def reply(self, code: int, body: bytes) -> None:
        """Send a complete response."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write nothing to the training log."""
