"""Alerts of a job to a web server: a POST of a small JSON for each order, verdict, lost round, and the end of the job."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from unickpt.base.errors import ConfigError
from unickpt.base.limited_http import exchange
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.history import LONGEST_TEXT, HistoryEntry, Kind
from unickpt.steering.state.membership import Ending
from unickpt.steering.wire.outbox import Outbox

SCHEMA = 1
MOST, CLOSE_S = 100, 3.0
TIMEOUT_S, WHOLE_S = 5.0, 10.0  # of one read or write, and of a whole exchange
_ANSWER = 65_536  # bytes


def checked_url(text: str) -> SplitResult:
    """Return the parts of the URL that alerts are sent to.

    Args:
        text: URL, or the name of a file that holds it: other users of the machine can read command lines.

    Raises:
        ConfigError: it is not a URL with http or https, or the file cannot be read. The message does not show a path, which
            may be secret.
    """
    if "://" not in text:
        try:
            text = Path(text).read_text().strip()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--rdzv-conf webhook={text} is not a URL, and no file with one can be read: {err}") from err
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("--rdzv-conf webhook must be a URL http://HOST/... or https://HOST/..., without a user name")
    return parts


def post(url: SplitResult, body: bytes) -> None:
    """Send a body. Redirects and proxies are not followed.

    Raises:
        OSError: the server cannot be reached in time, its certificate is not valid, or its answer is not 2xx.
    """
    host, path = url.hostname or "", (url.path or "/") + (f"?{url.query}" if url.query else "")
    connection: http.client.HTTPConnection = (
        http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT_S, context=ssl.create_default_context())
        if url.scheme == "https"
        else http.client.HTTPConnection(host, url.port, timeout=TIMEOUT_S)
    )
    headers = {"Content-Type": "application/json", "User-Agent": "unickpt"}
    try:
        status, _ = exchange(connection, "POST", path, body, headers, _ANSWER, WHOLE_S)
    except http.client.HTTPException as err:
        raise ConnectionError(f"no web server answers ({type(err).__name__})") from err
    if not 200 <= status < 300:
        raise ConnectionError(f"HTTP status {status}" + (": redirects are not followed" if status < 400 else ""))


class Webhook:
    """Alerts of the job, sent by the agent that leads. No method raises or waits, but ``close``.

    Args:
        url: as ``checked_url`` returns it.
        job: name of the job for the receiver; '' if the name is a secret.
        leads: whether this agent leads.
    """

    def __init__(self, url: SplitResult, job: str, leads: Callable[[], bool]) -> None:
        self._url, self._job, self._leads = url, job, leads
        self._told: tuple[tuple[int, int], set[object]] = ((0, 0), set())
        self.outbox: Outbox[dict[str, Any]] = Outbox(f"an alert to {url.scheme}://{url.hostname}", self._send, most=MOST)

    def take(self, entry: HistoryEntry) -> None:
        """Send orders, rounds that end for another reason than growth, and the end of the job."""
        about: dict[str, Any] = {"cause": entry.cause, "text": entry.text}
        if entry.kind is Kind.ORDER:
            self._put("order", entry.epoch, entry.at_s, {"action": entry.action, "executed": bool(entry.action), **about})
        elif entry.kind is Kind.ENDED and entry.cause != Ending.JOINED.value:
            self._put("round_ended", entry.epoch, entry.at_s, about)
        elif entry.kind is Kind.CLOSED:
            self._put("closed", entry.epoch, entry.at_s, {"finished": entry.finished, **about})

    def reported(self, report: HubReport, at_s: float) -> None:
        """Send the verdicts of a report, each once in a round."""
        epoch, told = self._told if self._told[0] == report.epoch else (report.epoch, set[object]())
        self._told = epoch, told
        for finding in report.findings:
            key = (finding.fault, finding.hosts, finding.ranks)
            if key not in told:
                told.add(key)
                about = {"fault": finding.fault.value, "hosts": list(finding.hosts), "ranks": list(finding.ranks)}
                self._put("verdict", report.epoch, at_s, {**about, "text": finding.text})

    def close(self) -> None:
        """Send what waits."""
        self.outbox.close(CLOSE_S)

    def _put(self, kind: str, epoch: tuple[int, int], at_s: float, about: dict[str, Any]) -> None:
        if self._leads():
            text = str(about.pop("text"))[:LONGEST_TEXT]
            self.outbox.put(
                {
                    "schema": SCHEMA, "kind": kind, "job": self._job, "round": f"{epoch[0]}.{epoch[1]}", "at": round(at_s, 3),
                    **about, "text": f"unickpt: {kind.replace('_', ' ')}: {text}",
                }
            )  # fmt: skip

    def _send(self, alert: dict[str, Any]) -> None:
        post(self._url, json.dumps(alert).encode())
