"""The host's diagnosis agent, as torchrun's agent sees it: started once, assigned to every round, started again if it ends.

Everything here may fail without effect on training: the failure is a warning, and no verdict leads to an order.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from unickpt.base.logs import logger, printable
from unickpt.base.private_files import SHARED_MEMORY
from unickpt.base.round_folder import RINGS, RINGS_JOB, read_commits, remove_note
from unickpt.diagnosis.agent.launch import run_isolated
from unickpt.diagnosis.recording.ring import SUFFIX
from unickpt.diagnosis.recording.ring_folder import fresh_folder, remove_old
from unickpt.steering.host.watcher import Assignment, end_line
from unickpt.steering.policy.reports import HubReport, report_from_json
from unickpt.steering.wire.addresses import LOOPBACKS, is_loopback, listening_socket, loopback_of
from unickpt.steering.wire.codec import SteeringError, join_address

MODULE = "unickpt.steering.host.watcher"
LONGEST_REPORT = 4 << 20  # bytes
RESTARTS, RESTARTS_S = 3, 600.0  # that the agent is started again within a time
_KEPT_S = 7 * 24 * 3600.0
_KEPT_FOLDERS = 2  # of the newest rounds


class HostAgent:
    """Owner of the agent's process. No method raises.

    Args:
        run_id: ``--rdzv-id``.
        key: key of the job.
        own_name: returns the name of this host in the job.
        own_host: returns the name or address of this machine for other hosts.
        alone: whether the job has no other machine.
        take: takes a report.
        record: record of the workers, which the process ends if this one ends without them; None for none.
        job: name of the job in metrics; '' for none.
    """

    def __init__(
        self,
        run_id: str,
        key: bytes,
        own_name: Callable[[], str],
        own_host: Callable[[], str],
        alone: bool,
        take: Callable[[HubReport], None],
        record: Path | None = None,
        job: str = "",
    ) -> None:
        self._record, self._job = record, job
        self._run_id, self._own_name, self._own_host, self._take = run_id, own_name, own_host, take
        self._key = hmac.new(key, b"snapshots of hosts", hashlib.sha256).hexdigest()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._hubs: dict[tuple[int, int], str] = {}
        self._assignment: Assignment | None = None
        self._folders: list[Path] = []
        self._starts: list[float] = []
        self._closed = False
        self._refused = 0
        try:
            own = self._own_host()
            self._listener = listening_socket((loopback_of(own) if is_loopback(own) else LOOPBACKS[0]) if alone else "", 0)
            remove_old(SHARED_MEMORY, older_than_s=_KEPT_S)
            with self._lock:
                self._start()
        except Exception as err:
            self._warn("the diagnosis agent of this host cannot be started", err)

    @property
    def pid(self) -> int:
        """Process number of the agent; 0 without one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def hub(self, epoch: tuple[int, int]) -> str:
        """Return the address where the agent of this host collects the snapshots of a round; '' without an agent."""
        if self._listener is None or not self.pid:
            return ""
        if epoch not in self._hubs:
            address = join_address(self._own_host(), self._listener.getsockname()[1])
            self._hubs = {epoch: f"http://{address}/{secrets.token_hex(16)}"}
        return self._hubs[epoch]

    def commits(self) -> int | None:
        """Return how many checkpoints the round has committed, as far as this host knows; None if it does not say."""
        return read_commits(self._folders[-1]) if self._assignment is not None and self._folders else None

    def begin(self, epoch: tuple[int, int], hub: str, is_hub: bool) -> None:
        """Assign the agent to a round, and set the environment of its workers."""
        os.environ.pop(RINGS, None)
        try:
            with self._lock:
                if self._listener is None:
                    return
                if not self.pid:
                    self._start()
                folder = fresh_folder(SHARED_MEMORY, self._run_id)
                self._folders.append(folder)
                self._remove_old_folders()
                self._assignment = Assignment(epoch, self._own_name(), str(folder), hub, is_hub, self._key, self._job)
                self._write(self._assignment.line())
            os.environ[RINGS], os.environ[RINGS_JOB] = str(folder), self._run_id
        except Exception as err:
            self._warn("the diagnosis agent of this host does not know of the round", err)

    def end(self, last_look: bool) -> None:
        """The round is over. ``last_look``: whether its workers failed by themselves, so that the agent looks at them."""
        with self._lock:
            if self._assignment is not None:
                self._assignment = None
                with contextlib.suppress(OSError, ValueError):
                    self._write(end_line(last_look))

    def close(self) -> None:
        """Let the agent end when the ranks have ended."""
        with self._lock:
            self._closed = True
            for folder in self._folders:
                _remove_if_empty(folder)
            with contextlib.suppress(Exception):
                if self._process is not None and self._process.stdin is not None:
                    self._process.stdin.close()
                if self._listener is not None:
                    self._listener.close()

    # ------------------------------------------------------------ the process

    def _start(self) -> None:
        """Start the agent. The caller holds the lock."""
        assert self._listener is not None
        self._starts.append(time.monotonic())
        workers = [] if self._record is None else ["--workers", str(self._record)]
        self._process = run_isolated(
            ["--listen", str(self._listener.fileno()), *workers],
            pass_fds=(self._listener.fileno(),),
            metrics=True,
            module=MODULE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._read, args=(self._process,), name="unickpt-steering-reports", daemon=True).start()

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Thread: take the reports of one process until it ends."""
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while line := process.stdout.readline(LONGEST_REPORT):
                try:
                    report = report_from_json(json.loads(line))
                except (SteeringError, ValueError, RecursionError) as err:
                    self._refused += 1
                    if self._refused in (1, 10, 100) or self._refused % 1000 == 0:
                        self._warn(f"report {self._refused} of the diagnosis agent is malformed and changes nothing", err)
                    continue
                self._take(report)
        process.wait()
        self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        """The agent has ended: start it again in the same round, but not again and again."""
        with self._lock:
            if self._closed or process is not self._process:
                return
            now_s = time.monotonic()
            again = len([at for at in self._starts if now_s - at < RESTARTS_S]) <= RESTARTS
            logger.warning(
                "unickpt: steering: the diagnosis agent of this host has ended (status %d). Training is not affected. %s",
                process.returncode,
                "It is started again" if again else "Until the next round no verdict leads to an order",
            )
            if not again:
                return
            try:
                self._start()
                if self._assignment is not None:
                    self._write(self._assignment.line())
            except Exception as err:
                self._warn("the diagnosis agent of this host cannot be started", err)

    def _remove_old_folders(self) -> None:
        """Remove the folders of rounds before the last one: rings are large."""
        for folder in self._folders[:-_KEPT_FOLDERS]:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = self._folders[-_KEPT_FOLDERS:]
        for folder in self._folders[:-1]:
            _remove_if_empty(folder)

    def _warn(self, what: str, err: Exception) -> None:
        logger.warning(
            "unickpt: steering: %s. Training is not affected (%s: %s)", what, type(err).__name__, printable(str(err)[:200])
        )


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a round without timing. With rings, the notes say how their ranks have ended."""
    if any(folder.glob(f"*{SUFFIX}")):
        return
    remove_note(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()
