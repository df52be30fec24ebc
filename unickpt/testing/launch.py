"""Launch jobs of several ranks on this machine, on CPU, with a time limit, and show their output when they fail.

``torchrun`` runs a job to its end. ``start`` and ``end`` run one beside the caller, and ``leave`` ends a rank that has done its
work. Needs PyTorch. Jobs that exceed their time limit need psutil as well.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import psutil

_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC")
_OUTPUT_CHARACTERS = 8000
_PIPE_S = 10.0


class StartedJob(Protocol):
    """What ``end`` and ``finish`` use of ``subprocess.Popen``."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, object]: ...
    def kill(self) -> None: ...


def free_port() -> int:
    """Return a TCP port of the loopback interface that no process listens on.

    It lies below the range from which Linux takes the ports of outgoing connections (``ip_local_port_range``, 32768 to 60999):
    a connection of another process would else take the port between this call and the start of the server.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def environment(folder: str | os.PathLike[str] | None = None, **extra: str) -> dict[str, str]:
    """Return the environment of a job on CPU: one thread per rank, and no variables of a surrounding torchrun.

    Args:
        folder: first entry of ``PYTHONPATH``. Default: the current directory.
        extra: variables to add or replace.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_RANK)}
    path = os.pathsep.join([str(Path(folder or ".").resolve()), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **extra}


def command(world: int, *program: str) -> list[str]:
    """Return the torchrun command for ``world`` ranks. ``program`` is a script or ``-m MODULE``, with its arguments."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), *program,
    ]  # fmt: skip


def start(
    world: int,
    *program: str,
    output: int | IO[str],
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a job in a new session and return the torchrun process. The caller ends the job with ``end``.

    Args:
        world: number of ranks.
        program: a script or ``-m MODULE``, with its arguments.
        output: destination of stdout and stderr of all ranks: a text file, or ``subprocess.PIPE``.
        folder: working directory and first entry of ``PYTHONPATH``. Default: the current directory.
        env: variables to add to ``environment(folder)``.
    """
    return started(command(world, *program), output, folder, env)


def started(
    program: list[str], output: int | IO[str], folder: str | os.PathLike[str] | None, env: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        program, cwd=folder, env=environment(folder, **(env or {})), stdout=output, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def end(process: StartedJob, *, abort_s: float = 0.0) -> str:
    """Kill torchrun and its ranks, wait for them, and return the rest of the output if it is a pipe.

    A process that outlives its parents may hold the pipe open: 10 seconds after the kill, the output so far is returned.

    Args:
        process: result of ``start``. It may have ended.
        abort_s: seconds that the ranks get to end after SIGABRT, on which faulthandler prints the stacks of all threads. 0
            kills them at once.
    """
    import psutil

    ranks: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children(recursive=True)  # torchrun starts each rank in a new session
    if abort_s:
        _signal(ranks, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=abort_s)[0] or ""
    _signal(ranks, signal.SIGKILL)
    process.kill()
    try:
        return process.communicate(timeout=_PIPE_S)[0] or ""
    except subprocess.TimeoutExpired as late:
        so_far = late.output or ""
        return so_far if isinstance(so_far, str) else so_far.decode(errors="replace")  # bytes, although text=True


def _signal(processes: list[psutil.Process], number: int) -> None:
    import psutil

    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def torchrun(
    world: int,
    module: str,
    *arguments: str,
    timeout_s: float = 600,
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun --nproc-per-node WORLD -m MODULE ARGUMENTS`` to its end and return its exit status and output.

    Args:
        world: number of ranks.
        module: module that is importable from ``folder``.
        arguments: arguments of the module.
        timeout_s: seconds until every rank is aborted with SIGABRT.
        folder: working directory and first entry of ``PYTHONPATH``. Default: the current directory.
        env: variables to add to ``environment(folder)``.
        check: whether an exit status other than 0 raises.

    Raises:
        AssertionError: The job exceeded its time limit, or failed. The message has the end of its output, with the stacks of
            all ranks if it exceeded its time limit.
    """
    program = command(world, "-m", module, *arguments)
    return finish(started(program, subprocess.PIPE, folder, env), program, module, timeout_s, check)


def finish(
    process: StartedJob, program: list[str], module: str, timeout_s: float, check: bool
) -> subprocess.CompletedProcess[str]:
    """Wait for a job to end; see ``torchrun``."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        output = end(process, abort_s=30)
        raise AssertionError(f"{module} did not end within {timeout_s} s:\n{output[-_OUTPUT_CHARACTERS:]}") from None
    except BaseException:
        end(process)
        raise
    if check and process.returncode != 0:
        raise AssertionError(f"{' '.join(program)} failed:\n{output[-_OUTPUT_CHARACTERS:]}")
    return subprocess.CompletedProcess(program, process.returncode or 0, output, "")


def leave() -> None:
    """End a rank that has done its work with exit status 0, after pending saves.

    With torch 2.13, a gloo thread that needs the interpreter while the interpreter shuts down aborts the process
    ("terminate called without an active exception"). About one in four jobs on a busy machine would fail this way after
    all work is done, without DeepSpeed and unickpt too.

    Call it where the model still exists. The end of a ``DistributedDataParallel`` on gloo holds the interpreter and waits for a
    gloo thread, which may need the interpreter to free a tensor: the rank then hangs, in about one of four such jobs on a
    busy machine (pytorch/pytorch#56297).
    """
    if "unickpt.checkpoint.save.shutdown" in sys.modules:
        sys.modules["unickpt.checkpoint.save.shutdown"].finish_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
