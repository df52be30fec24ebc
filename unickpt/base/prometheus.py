"""Where Prometheus finds the metrics of a job: a port of the host, and a file for its service discovery.

Several jobs on a host are given the same port by their configuration. The first gets it, and each other one the next free port.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.limited_http import listening_at

PORTS = 16  # that are tried, from the given one on
JOB_NAME, ROLE = "job_name", "role"  # labels: a label ``job`` of a target is Prometheus' own name of the scrape


@dataclass(frozen=True, slots=True)
class Scrape:
    """How Prometheus reaches a process.

    Attributes:
        port: first port that is tried; 0: Prometheus is not answered.
        address: address that the port is bound to.
        targets: folder for the file of service discovery; '' for none.
        job: name of the job in all values; '' for none.
        role: role of these ranks, if the job has several; '' otherwise.
    """

    port: int = 0
    address: str = "127.0.0.1"
    targets: str = ""
    job: str = ""
    role: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all values."""
        return {name: text for name, text in ((JOB_NAME, self.job), (ROLE, self.role)) if text}


NOT_ANSWERED = Scrape()


def scrape_from(found: Mapping[str, Any]) -> Scrape:
    """Return what ``dataclasses.asdict`` made a mapping of.

    Raises:
        KeyError, TypeError, ValueError: it is not such a mapping.
    """
    texts = {name: str(found[name]) for name in ("address", "targets", "job", "role")}
    return Scrape(int(found["port"]), **texts)


class OpenPort:
    """A port that Prometheus can be answered on.

    Attributes:
        listener: listening socket.
    """

    def __init__(self, listener: socket.socket, file: Path | None) -> None:
        self.listener, self._file = listener, file

    def withdraw(self) -> None:
        """Remove the file of service discovery."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()


def open_port(scrape: Scrape, tell: Callable[[str], None]) -> OpenPort | None:
    """Open the port, or the next free one, and write the file. ``tell`` a person what is not as asked. None: no port."""
    listener, problem = None, ""
    for port in range(scrape.port, min(scrape.port + PORTS, 65_536)):
        try:
            listener = listening_at(scrape.address, port)
            break
        except (OSError, ValueError, OverflowError) as err:
            problem = problem or str(err)
            if not isinstance(err, OSError) or err.errno != errno.EADDRINUSE:
                break
    if listener is None:
        tell(f"Prometheus is not answered on {scrape.address} port {scrape.port}: {problem}")
        return None
    if port != scrape.port:
        tell(f"Prometheus is answered on {scrape.address} port {port}: port {scrape.port} is taken, as by another job")
    try:
        return OpenPort(listener, _announced(scrape, port) if scrape.targets else None)
    except OSError as err:
        tell(f"Prometheus does not find port {port} by itself: the file of its targets cannot be written ({err})")
        return OpenPort(listener, None)


def _announced(scrape: Scrape, port: int) -> Path:
    """Write the file of a port, which any user may read. A process that was killed leaves it to the next one on this port."""
    here = socket.gethostname()
    host = here if scrape.address in ("", "0.0.0.0", "::") else scrape.address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    folder = Path(scrape.targets)
    folder.mkdir(parents=True, exist_ok=True)
    file, written = folder / f"unickpt-{here}-{port}.json", folder / f".unickpt-{here}-{port}.{os.getpid()}"
    written.write_text(json.dumps([{"targets": [target], "labels": scrape.labels}]) + "\n")
    written.chmod(0o644)
    written.replace(file)
    return file
