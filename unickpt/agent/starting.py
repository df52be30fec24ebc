"""How a training process starts its host's agent, and how the agents of a job find each other: through the job's store.

Imported by training processes: nothing heavy here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("unickpt")

ADDRESS = "agent"  # in the folder of the rings: where the job's first agent listens, for its owner alone to read
_LOOKS_S, _GIVES_UP_S = 1.0, 600.0


def start(folder: Path, rank: int, store: Any, metrics_port: int = 0) -> subprocess.Popen[bytes] | None:
    """Start it in the background, in a session of its own: what ends the ranks does not end it. Never raises.

    Args:
        folder: of the rings.
        rank: of this process. On rank 0's host the agent listens for the others.
        store: of the job, as torch has it.
        metrics_port: of rank 0's host, for Prometheus; 0 for none.
    """
    try:
        if rank == 0:
            listener = _listener()
            with listener:
                address = f"http://{_own_name()}:{listener.getsockname()[1]}/{secrets.token_hex(16)}"
                write_address(folder, address)
                if _several_hosts():
                    store.set(_key(), address)
                options = ["--listen", str(listener.fileno()), "--metrics-port", str(metrics_port)]
                return _run([str(folder), *options], pass_fds=(listener.fileno(),))
        threading.Thread(target=_find, args=(folder, store), name="unickpt-agent-address", daemon=True).start()
        return _run([str(folder)])
    except Exception as err:
        logger.warning("unickpt: rank %d: no agent on this host (%s: %s)", rank, type(err).__name__, err)
        return None


def _run(arguments: list[str], pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    env = {**os.environ, "UNICKPT_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unickpt.agent", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, start_new_session=True, pass_fds=pass_fds)


def write_address(folder: Path, address: str) -> None:
    """For the agent of this host, and for ``unickpt diagnose``."""
    fresh = folder / f"{ADDRESS}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(address)
    fresh.replace(folder / ADDRESS)


def read_address(folder: Path) -> str:
    """Where the job's first agent listens; '' if that is not known here."""
    try:
        return (folder / ADDRESS).read_text()
    except OSError:
        return ""


def _find(folder: Path, store: Any) -> None:
    """Beside training: ask the store until rank 0 has put the address there. Never waits in the store itself."""
    end = time.monotonic() + _GIVES_UP_S
    with contextlib.suppress(Exception):
        while time.monotonic() < end:
            if store.check([_key()]):
                write_address(folder, store.get(_key()).decode())
                return
            time.sleep(_LOOKS_S)


def _key() -> str:
    return f"unickpt/agent/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _listener() -> socket.socket:
    """Of any interface only where there are ranks on other hosts."""
    listener = socket.socket()
    listener.bind(("0.0.0.0" if _several_hosts() else "127.0.0.1", 0))
    listener.listen(128)
    return listener


def _own_name() -> str:
    """That other hosts know this one by: rank 0 is on the master's."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname() if _several_hosts() else "127.0.0.1"


def _several_hosts() -> bool:
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) != world
