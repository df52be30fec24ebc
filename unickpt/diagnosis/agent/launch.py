"""Start of a host's agent by training. The agents of a job find each other through the job's store.

The address of the job's first agent contains a secret. Training passes it to the agent through a pipe, because other users
can read command lines and environments. A copy for ``unickpt diagnose`` is in the folder of the rings.

Training processes import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unickpt.base import isolated_process
from unickpt.base.logs import logger
from unickpt.base.private_files import TOKEN, read_text, replacing
from unickpt.base.prometheus import NOT_ANSWERED, Scrape
from unickpt.diagnosis.recording.ring_folder import start_of_workers

ADDRESS = "agent"  # in the folder of the rings: where the job's first agent listens, for its owner alone to read
LONGEST_ADDRESS = 1024
_VALID = re.compile(rf"http://[^\s/]{{1,300}}:\d{{1,5}}/{TOKEN}")
_LOOKS_S, _GIVES_UP_S = 1.0, 600.0


def start(folder: Path, rank: int, store: Any, metrics: Scrape = NOT_ANSWERED) -> subprocess.Popen[bytes] | None:
    """Start the agent in the background, in its own session, so that it outlives the ranks. Never raises.

    Args:
        folder: absolute path of the folder with the rings.
        rank: first rank of this host. On rank 0's host the agent listens for the others.
        store: torch's store of the job.
        metrics: where the agent on rank 0's host answers Prometheus. The role is in every line that the agent writes.
    """
    named = ["--role", metrics.role] if metrics.role else []
    try:
        if rank == 0:
            with _listener() as listener:
                address = f"http://{_own_name()}:{listener.getsockname()[1]}/{secrets.token_hex(16)}"
                if _several_hosts():
                    store.set(_key(), address)
                options = ["--listen", str(listener.fileno()), *named]
                if metrics.port:
                    options += ["--metrics", json.dumps(asdict(metrics))]
                process = run_isolated([str(folder), *options], pass_fds=(listener.fileno(),), metrics=bool(metrics.port))
            _hand_over(process, folder, address)
            return process
        process = run_isolated([str(folder), *named])
        threading.Thread(target=_find, args=(process, folder, store), name="unickpt-agent-address", daemon=True).start()
        return process
    except Exception as err:
        logger.warning("unickpt: rank %d: no agent on this host (%s: %s)", rank, type(err).__name__, err)
        return None


def run_isolated(
    arguments: list[str],
    *,
    pass_fds: tuple[int, ...] = (),
    metrics: bool = False,
    module: str = "unickpt.diagnosis.agent.__main__",
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Run an agent, the function ``main`` of a module (``isolated_process``). ``metrics``: it needs Prometheus' package.

    ``pynvml`` is used if it is installed.
    """
    packages = ["unickpt", "numpy", "pynvml", *(["prometheus_client"] if metrics else [])]
    return isolated_process.run_isolated(module, arguments, packages=packages, pass_fds=pass_fds, stdout=stdout)


def _hand_over(process: subprocess.Popen[bytes], folder: Path, address: str) -> None:
    """Write the address to the agent's standard input and to a file."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            with process.stdin:
                process.stdin.write(f"{address}\n".encode())
    write_address(folder, address)


def write_address(folder: Path, address: str) -> None:
    """Write the address for ``unickpt diagnose`` and ``unickpt agent``. Agents started by training do not read it."""
    with replacing(folder / ADDRESS) as file:
        file.write(address.encode())


def read_address(folder: Path) -> str:
    """Return the address of the job's first agent; '' if the folder has none."""
    return read_text(folder / ADDRESS, LONGEST_ADDRESS).strip()


def _find(process: subprocess.Popen[bytes], folder: Path, store: Any) -> None:
    """Thread beside training: poll the store for the address, without waiting in the store."""
    end = time.monotonic() + _GIVES_UP_S
    with contextlib.suppress(Exception):
        while time.monotonic() < end:
            if store.check([_key()]):
                address = store.get(_key()).decode()
                if not _VALID.fullmatch(address):
                    logger.warning("unickpt: the job's store holds no address of an agent at %s: %r", _key(), address[:80])
                    return
                _hand_over(process, folder, address)
                return
            time.sleep(_LOOKS_S)


def _key() -> str:
    return f"unickpt/agent/{start_of_workers()}"


def _listener() -> socket.socket:
    """Open the listening socket: on all interfaces only if there are other hosts."""
    listener = socket.socket()
    listener.bind(("0.0.0.0" if _several_hosts() else "127.0.0.1", 0))
    listener.listen(128)
    return listener


def _own_name() -> str:
    """Return the name of this host for other hosts. Rank 0 is on the master's host."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname() if _several_hosts() else "127.0.0.1"


def _several_hosts() -> bool:
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) != world
