"""A real S3 server (moto, in a separate process), and a relay in front of it that delays, refuses or ends connections."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from unickpt.testing.launch import environment, free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",  # an unreachable store is reported sooner
}
_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>not for you</Message></Error>"
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@contextmanager
def server(log: Path) -> Iterator[int]:
    """Run the server, and yield its port."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=environment(), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _await_answer(port, process, log)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def _await_answer(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            ask(port, "GET", "/")
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the S3 server does not answer:\n{log.read_text()}")


def ask(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """Send one request without an S3 library."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20250101/us-east-1/s3/aws4"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise KeyError(f"{method} {path}: {answer.status} {data[:500]!r}")
        return data
    finally:
        connection.close()


class Bucket:
    """A bucket of the server, accessed without unickpt and fsspec."""

    def __init__(self, port: int, name: str) -> None:
        self.port, self.name = port, name
        ask(port, "PUT", f"/{name}")

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def get(self, key: str) -> bytes:
        return ask(self.port, "GET", f"/{self.name}/{key}")

    def put(self, key: str, data: bytes) -> None:
        ask(self.port, "PUT", f"/{self.name}/{key}", data)

    def delete(self, key: str) -> None:
        ask(self.port, "DELETE", f"/{self.name}/{key}")

    def keys(self) -> list[str]:
        return self._listed("?list-type=2", "Key")

    def uploads(self) -> list[str]:
        """Return the keys of multipart uploads that are neither complete nor aborted."""
        return self._listed("?uploads", "Key")

    def etag(self, key: str) -> str:
        """Return the ETag. That of a multipart upload ends with the number of parts."""
        listed = dict(zip(self.keys(), self._listed("?list-type=2", "ETag"), strict=True))
        return listed[key].replace("&quot;", "").strip('"')

    def _listed(self, query: str, element: str) -> list[str]:
        text = ask(self.port, "GET", f"/{self.name}{query}").decode()
        return [part.partition(f"</{element}>")[0] for part in text.split(f"<{element}>")[1:]]


Rule = Callable[[str, str], str]  # method, path with query -> '', 'refuse', 'lose' (executed, but the response is lost), 'end'


class Relay:
    """Forwards requests to the server according to a rule.

    Attributes:
        rule: what becomes of a request.
        requests: method and path of all that came.
        most: how many range reads were under way at a time.
    """

    def __init__(self, port: int) -> None:
        self.target, self.port = port, free_port()
        self.rule: Rule = lambda _method, _path: ""
        self.requests: list[tuple[str, str]] = []
        self.hold_reads = False
        self.most = 0
        self._reading = 0
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return lambda: relay.pass_on(self)
                raise AttributeError(name)

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop answering at this address."""
        if self._server is not None:
            ended, self._server = self._server, None
            ended.socket.close()
            threading.Thread(target=ended.shutdown, daemon=True).start()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = self._body(handler)
        self.requests.append((handler.command, handler.path))
        verdict = "end" if self._server is None else self.rule(handler.command, urllib.parse.unquote(handler.path))
        if verdict == "end":
            self.stop()
            handler.close_connection = True
            return
        status, headers, data = 403, {"Content-Type": "application/xml"}, _DENIED
        if verdict != "refuse":
            self._hold(handler)
            status, headers, data = self._asked(handler, body)
        if verdict == "lose":
            status, headers, data = 403, {"Content-Type": "application/xml"}, _DENIED
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    @staticmethod
    def _body(handler: BaseHTTPRequestHandler) -> bytes:
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.wfile.flush()
        if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            chunks.append(handler.rfile.read(size))
            handler.rfile.readline()
        while handler.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _hold(self, handler: BaseHTTPRequestHandler) -> None:
        """Delay a range read until another one arrives, or a time limit."""
        if handler.command != "GET" or "Range" not in handler.headers or not self.hold_reads:
            return
        with self._changed:
            self._reading += 1
            self.most = max(self.most, self._reading)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= 2, timeout=3)
            self._reading -= 1

    def _asked(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for key, value in handler.headers.items():
                if key.lower() not in _HOP | {"expect"}:
                    connection.putheader(key, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            headers = {key: value for key, value in answer.getheaders() if key.lower() not in _HOP}
            if handler.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length") or "0"
            return answer.status, headers, data
        finally:
            connection.close()
