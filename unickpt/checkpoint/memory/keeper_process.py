"""Start of the keeper of this host by the first rank on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from pathlib import Path

from unickpt.base.isolated_process import run_isolated

_PAUSE_S, _LONG_S = 0.1, 30.0  # before a keeper is started again: at first, and if it dies again and again
_PACKAGES = ("unickpt", "numpy", "xxhash")


class KeeperProcess:
    """A keeper that this process has started. It ends with this process.

    Args:
        parent: directory in memory that all users share.
        token: token of the save directory.
        reach: address of another host of the job, such as MASTER_ADDR; '' if there is only this one. The keeper listens on the
            interface towards it.

    Attributes:
        address: ``http://HOST:PORT/SECRET``, for the ranks of the job only.
    """

    def __init__(self, parent: str, token: str, reach: str) -> None:
        host = own_address(reach)
        self._parent, self._token, self._secret = parent, token, secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._pause_s = threading.Lock(), _PAUSE_S
        self._listener = socket.create_server((host, 0), backlog=128)  # stays open: a keeper that starts later has its address
        self.address = f"http://{host}:{self._listener.getsockname()[1]}/{self._secret}"
        self.start()

    def start(self) -> None:
        """Start the keeper, also in place of one that has died. One that dies without ``stop`` is started again.

        Raises:
            OSError: the process cannot be started.
        """
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        self._process = run_isolated(
            "unickpt.checkpoint.memory.keeper",
            [str(Path(self._parent).absolute()), self._token, "--listen", str(self._listener.fileno())],
            packages=_PACKAGES,
            pass_fds=(self._listener.fileno(),),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._secret}\n".encode())
        self._process.stdin.flush()  # and stays open: its end tells the keeper that this process is gone
        threading.Thread(target=self._watch, args=(self._process,), name="unickpt-keeper", daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Start the keeper again when it has died. Connections that nobody has accepted meanwhile reach the new one."""
        begin = time.monotonic()
        process.wait()
        self._pause_s = _PAUSE_S if time.monotonic() - begin > _LONG_S else min(2 * self._pause_s, _LONG_S)
        time.sleep(self._pause_s)
        with self._lock, contextlib.suppress(OSError, RuntimeError):  # the interpreter may be shutting down
            if self._process is process:
                self._begin()

    @property
    def runs(self) -> bool:
        """Whether the keeper runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process number of the keeper."""
        return 0 if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the keeper. It can be started again."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.terminate()
            process.wait(10)


def own_address(reach: str) -> str:
    """Return the address of this host on the interface towards another one. No packet is sent."""
    if not reach:
        return "127.0.0.1"
    try:
        family, _, _, _, where = socket.getaddrinfo(reach, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def reach_of_job() -> str:
    """Return an address of another host of this job, from the variables of torchrun and DeepSpeed; '' on a single host."""
    world = os.environ.get("WORLD_SIZE", "1")
    return "" if os.environ.get("LOCAL_WORLD_SIZE", world) == world else os.environ.get("MASTER_ADDR", "")
