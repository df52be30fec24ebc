"""What an agent tells of the events of its job, to people and to programs. Its failures never reach the job."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.base.installation import extra_command
from unickpt.base.limited_http import ConnectionLimits, LimitedHandler, LimitedServer
from unickpt.base.logs import logger, printable
from unickpt.base.options.steering import SteeringOptions
from unickpt.base.private_files import SHARED_MEMORY
from unickpt.base.prometheus import Scrape, open_port
from unickpt.diagnosis.reports.metrics import exposition, labelled
from unickpt.steering.publishing.chronicle import Chronicle, HistoryFile, Take
from unickpt.steering.publishing.metrics import HELP, steering_measurements
from unickpt.steering.publishing.webhook import Webhook, checked_url


class Observers:
    """The file of the history, alerts and metrics.

    Attributes:
        chronicle: takes states and reports.
        leads: whether this agent leads; to be set when this is known.

    Raises:
        ConfigError: the URL of the webhook is not valid.
    """

    def __init__(self, options: SteeringOptions, run_id: str) -> None:
        self.leads: Callable[[], bool] = lambda: False
        job = options.job_name(run_id)
        self._webhook = Webhook(checked_url(options.webhook), job, lambda: self.leads()) if options.webhook else None
        self._file: HistoryFile | None = None
        try:
            host = options.host or socket.gethostname()
            self._file = HistoryFile(options.history, SHARED_MEMORY, run_id, host, secrets.token_hex(4))
            logger.info("unickpt: steering: history in %s", printable(str(self._file.folder)))
        except OSError as err:
            logger.warning(
                "unickpt: steering: no history is kept, so 'unickpt report' has no rounds of this job. Training is not "
                "affected (%s)",
                printable(str(err)),
            )
        takers: list[Take] = [self._file.take] if self._file is not None else []
        hook = self._webhook
        self.chronicle = Chronicle([*takers, hook.take] if hook else takers, reporters=[hook.reported] if hook else [])
        if self._file is not None:
            self._file.attend(self.chronicle)
        targets = str(Path(options.metrics_targets).absolute()) if options.metrics_targets else ""
        scrape = Scrape(options.metrics_port, options.metrics_address, targets, job)
        self._port = open_port(scrape, _warn) if scrape.port else None
        self._server = _metrics_server(self.chronicle, self._port.listener, scrape) if self._port is not None else None

    def close(self) -> None:
        """End, after what waits is written and sent."""
        if self._file is not None:
            self._file.close()
        if self._webhook is not None:
            self._webhook.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._port is not None:
            self._port.withdraw()


def _warn(text: str) -> None:
    logger.warning("unickpt: steering: %s", printable(text))


def _metrics_server(chronicle: Chronicle, listener: socket.socket, scrape: Scrape) -> LimitedServer:
    """Serve ``/metrics`` in background threads, without a password."""

    class MetricsHandler(LimitedHandler):
        def do_GET(self) -> None:  # noqa: N802  (name required by http.server)
            if self.path != "/metrics":
                return self.reply(404, b"")
            state, entries = chronicle.known()
            try:
                found = steering_measurements(state, entries, time.monotonic(), time.time())
                text = exposition(labelled(found, scrape.labels), HELP)
                return self.reply(200, text.encode(errors="backslashreplace"))
            except ConfigError as err:  # prometheus_client is not installed
                return self.reply(501, f"{err}\n".encode())

    if importlib.util.find_spec("prometheus_client") is None:
        command = extra_command("metrics")
        logger.warning("unickpt: steering: Prometheus gets an error for an answer: install prometheus-client (%s)", command)
    server = LimitedServer(listener, MetricsHandler, lambda text: logger.warning("unickpt: %s", text), ConnectionLimits())
    threading.Thread(target=server.serve_forever, name="unickpt-steering-metrics", daemon=True).start()
    return server
