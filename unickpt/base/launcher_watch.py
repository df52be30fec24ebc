"""A worker ends with its launcher: with torchrun's agent, or with DeepSpeed's ``launch.py``.

Both start workers that live on when the launcher alone is killed, for instance by the kernel for lack of memory. The
supervisor starts the launcher again, and two copies of the job save into one folder. So a worker gets SIGTERM when its launcher
has ended, as if the launcher had sent it, and SIGKILL after ``left_workers.TERM_S``.
What a worker has started, such as an upload or an evaluation, has the same environment and is left alone.

The kernel can send the signal (``PR_SET_PDEATHSIG``), also to a process whose interpreter is blocked. It sends it at the end of
the *thread* that has started the worker, so this is used only if that is the main thread of the launcher. Otherwise a thread
waits for the end of the launcher. Under ``--rdzv-backend unickpt`` the signal comes from one of several parties
(``left_workers``), so the kernel is not asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.left_workers import AGENT, TERM_S, WORKER, digest_of, first_to_end, left_in, records_folder, send
from unickpt.base.logs import logger
from unickpt.base.process_identity import ProcessIdentity, environment_of
from unickpt.base.round_folder import RUN_ID

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TORCHRUN, _DEEPSPEED = (RUN_ID, "MASTER_PORT", "RANK"), ("CROSS_RANK", "MASTER_PORT", "RANK")
_MOST = 16  # generations of processes between a worker and its launcher
_watching = 0  # process that watches; a forked child does not


@dataclass(frozen=True, slots=True)
class Launcher:
    """What has started this process as a worker.

    Attributes:
        process: the launcher; None if it has ended already.
        direct: its main thread has started this process.
        record: record of the workers (``left_workers``), if it keeps one.
    """

    process: ProcessIdentity | None
    direct: bool = False
    record: Path | None = None


def end_with_launcher() -> None:
    """Let this process end with its launcher, if it has one. Never raises. Later calls do nothing."""
    global _watching
    with contextlib.suppress(Exception):
        if _watching != os.getpid():
            _watching = os.getpid()
            launcher = launcher_of_this()
            if launcher is not None:
                _watch(launcher)


def launcher_of_this() -> Launcher | None:
    """Return the launcher of this worker. None: it has no known launcher, or is not surely a worker.

    The launcher is the first ancestor that was not started with this worker's own variables. What a worker has started has
    these variables too, and may outlive the job: it is no worker.
    """
    mark = _Mark.of_this()
    if known_launcher() == "" or (mark is not None and mark.worker != os.getpid()):
        return None
    variables = _TORCHRUN if RUN_ID in os.environ else _DEEPSPEED
    own = {f"{name}={os.environ.get(name, '')}".encode() for name in variables}
    given = ProcessIdentity.parse(os.environ.get(AGENT, ""))
    child, parent = os.getpid(), os.getppid()
    for _ in range(_MOST):
        if parent == 0:
            return None
        environment = environment_of(parent)
        if not environment and parent != 1:
            return None  # of another user
        if not own <= environment:
            break
        if _has_torch(parent):  # a worker has started this process; a script that only starts the worker has no torch
            return None
        child, parent = parent, _parent_of(parent)
    if os.getsid(child) != os.getsid(0):
        return None
    if given is not None:
        return _agent(given, child, parent)
    if environment and _has_torch(parent):
        found = None if _of_worker(environment, variables) else ProcessIdentity.of(parent)
        direct = child == os.getpid() and _started_by_main_thread(parent, child)
        return None if found is None else Launcher(found, direct=direct)
    # the reaper of orphans; workers of torchrun lead sessions
    left = mark is not None and mark.launcher not in (0, os.getppid()) and variables is _TORCHRUN
    return Launcher(None) if left and os.getsid(0) == os.getpid() else None


def _agent(given: ProcessIdentity, child: int, parent: int) -> Launcher | None:
    """Return the agent of ``--rdzv-backend unickpt`` if it has started ``child``. An agent that ends in order has no record."""
    record = _record_of(given) if given.is_near else None
    if given.lives:
        return Launcher(given, record=record) if given.pid == parent else None
    if record is None or child not in (left.process.pid for left in left_in(record)):
        return None
    return Launcher(None, record=record)


def _of_worker(environment: frozenset[bytes], variables: tuple[str, ...]) -> bool:
    """Return whether a process is itself a worker: what it starts with another rank is a program of its own."""
    return any(each.startswith(f"{variables[0]}=".encode()) for each in environment)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the first process of a worker that has loaded torch has noted in its environment (``_unickpt_autoload``).

    Attributes:
        worker: its number.
        launcher: number of its parent then, if that was not started with the variables of a worker; 0 otherwise.
    """

    worker: int
    launcher: int

    @classmethod
    def of_this(cls) -> _Mark | None:
        """Return the mark that this process has made or inherited; None without one of its launcher."""
        agent, _, numbers = os.environ.get(WORKER, "").rpartition("/")
        worker, _, launcher = numbers.partition(".")
        known = worker.isdigit() and launcher.isdigit() and agent == os.environ.get(AGENT, "")
        return cls(int(worker), int(launcher)) if known else None


def known_launcher() -> str:
    """Return the name of the program that has started this process as a worker, as its environment says; '' for none."""
    if os.environ.get(RUN_ID) is not None:
        return "torchrun"
    return "deepspeed" if os.environ.get("CROSS_RANK") is not None and "LOCAL_SIZE" in os.environ else ""


def _watch(launcher: Launcher) -> None:
    asked = False
    if launcher.direct and launcher.process is not None:
        kernel = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0
        asked = kernel and launcher.process.lives  # it may have ended just before
    threading.Thread(target=_wait, args=(launcher, asked), name="unickpt-launcher", daemon=True).start()


def _wait(launcher: Launcher, asked: bool) -> None:
    """Thread: wait for the end of the launcher, then end this process. ``asked``: the kernel sends SIGTERM."""
    if launcher.process is not None:
        launcher.process.wait()
    if launcher.record is not None and not launcher.record.exists():
        return  # it has ended in order
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    logger.error(
        "unickpt: the launcher of this process (%s) has ended without ending its workers. Process %d gets SIGTERM, and SIGKILL "
        "after %.0f s, so that it does not go on beside a copy of the job that is started again",
        known_launcher(),
        me.pid,
        TERM_S,
    )
    if not asked and (launcher.record is None or first_to_end(launcher.record, me)):
        send(me, signal.SIGTERM)
    time.sleep(TERM_S)
    send(me, signal.SIGKILL)


def _record_of(agent: ProcessIdentity) -> Path | None:
    with contextlib.suppress(OSError):
        return next((path for path in records_folder().iterdir() if path.name.endswith(f"-{digest_of(str(agent))}")), None)
    return None


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch, as launchers do and the reapers of orphans do not. True if unknown."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return True


def _started_by_main_thread(parent: int, child: int) -> bool:
    with contextlib.suppress(OSError):
        return str(child) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return False
