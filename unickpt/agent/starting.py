"""How a training process starts its host's agent, and how the agents of a job find each other: through the job's store.

The address of the job's first agent holds a secret. Training hands it to the agent through a pipe: command lines and
environments of processes can be read by others. A copy for ``unickpt diagnose`` lies in the folder of the rings.

Imported by training processes: nothing heavy here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unickpt.private_files import read_text, replacing

logger = logging.getLogger("unickpt")

ADDRESS = "agent"  # in the folder of the rings: where the job's first agent listens, for its owner alone to read
LONGEST_ADDRESS = 1024
_VALID = re.compile(r"http://[^\s/]{1,300}:\d{1,5}/[0-9a-f]{32}")
_LOOKS_S, _GIVES_UP_S = 1.0, 600.0


def start(
    folder: Path, rank: int, store: Any, *, metrics_port: int = 0, metrics_address: str = "127.0.0.1"
) -> subprocess.Popen[bytes] | None:
    """Start it in the background, in a session of its own: what ends the ranks does not end it. Never raises.

    Args:
        folder: of the rings, absolute.
        rank: of this process. On rank 0's host the agent listens for the others.
        store: of the job, as torch has it.
        metrics_port: of rank 0's host, for Prometheus; 0 for none.
        metrics_address: that this port is bound to.
    """
    try:
        if rank == 0:
            with _listener() as listener:
                address = f"http://{_own_name()}:{listener.getsockname()[1]}/{secrets.token_hex(16)}"
                if _several_hosts():
                    store.set(_key(), address)
                options = ["--listen", str(listener.fileno())]
                if metrics_port:
                    options += ["--metrics-port", str(metrics_port), "--metrics-address", metrics_address]
                process = _run([str(folder), *options], pass_fds=(listener.fileno(),), metrics=bool(metrics_port))
            _hand_over(process, folder, address)
            return process
        process = _run([str(folder)])
        threading.Thread(target=_find, args=(process, folder, store), name="unickpt-agent-address", daemon=True).start()
        return process
    except Exception as err:
        logger.warning("unickpt: rank %d: no agent on this host (%s: %s)", rank, type(err).__name__, err)
        return None


def _run(arguments: list[str], *, pass_fds: tuple[int, ...] = (), metrics: bool = False) -> subprocess.Popen[bytes]:
    """``python -m unickpt.agent``, but with nothing on its path that lies in the working directory or was put there by others.

    The interpreter starts isolated (``-I``: no environment, no working directory) and without ``site`` (``-S``). Its path is
    the standard library first, and then where this process has found the packages that the agent needs: that serves virtual
    environments, editable installs and ``PYTHONPATH`` alike.
    """
    places = places_of(["unickpt", "numpy", *(["prometheus_client"] if metrics else [])])
    code = f"import sys; sys.path += {places!r}; from unickpt.agent.__main__ import main; main()"
    flags = ["-I", "-S", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
    env = {**os.environ, "UNICKPT_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, *arguments], stdin=subprocess.PIPE, env=env, cwd="/", start_new_session=True,
        pass_fds=pass_fds,
    )  # fmt: skip


def places_of(packages: Sequence[str]) -> list[str]:
    """Absolute folders that hold these packages, as this process finds them; those that are not installed are left out."""
    found: list[str] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            place = os.path.abspath(Path(spec.origin).parent.parent)
            if place not in found:
                found.append(place)
    return found


def _hand_over(process: subprocess.Popen[bytes], folder: Path, address: str) -> None:
    """To the agent through its standard input, and to a person through a file."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            with process.stdin:
                process.stdin.write(f"{address}\n".encode())
    write_address(folder, address)


def write_address(folder: Path, address: str) -> None:
    """For ``unickpt diagnose`` and ``unickpt agent``, which a person calls. Training's own agents do not read it."""
    with replacing(folder / ADDRESS) as file:
        file.write(address.encode())


def read_address(folder: Path) -> str:
    """Where the job's first agent listens; '' if that is not known here."""
    return read_text(folder / ADDRESS, LONGEST_ADDRESS).strip()


def _find(process: subprocess.Popen[bytes], folder: Path, store: Any) -> None:
    """Beside training: ask the store until rank 0 has put the address there. Never waits in the store itself."""
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
