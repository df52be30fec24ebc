"""Run a worker program under torchrun on this machine, with a time limit and its output on failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def environment(**extra: str) -> dict[str, str]:
    """CPU, one thread per rank, deterministic ports; the tests' own package importable."""
    keep = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC"))
    }
    path = os.pathsep.join([str(REPO), *filter(None, [keep.get("PYTHONPATH")])])
    return {**keep, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **extra}


def torchrun(
    world: int, module: str, *arguments: str, timeout_s: float = 300, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node world -m module arguments``; raises AssertionError with the output if it fails."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=REPO, env=environment(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        ranks = psutil.Process(process.pid).children(recursive=True)  # torchrun puts them in sessions of their own
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)  # faulthandler prints every rank's stack
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            for rank in [*ranks, process]:
                rank.kill()
            output, _ = process.communicate()
        raise AssertionError(f"{module} did not end within {timeout_s} s:\n{output[-8000:]}") from None
    if check:
        assert process.returncode == 0, f"{module} {arguments} failed:\n{output[-8000:]}"
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def leave() -> None:
    """End a worker that has done its work.

    With torch 2.13, a gloo thread that wants the interpreter while it shuts down aborts the process
    ("terminate called without an active exception"), so that about one in four busy jobs would end with
    an error after everything had gone well; it needs neither DeepSpeed nor unickpt.
    """
    if "unickpt.interruption" in sys.modules:
        sys.modules["unickpt.interruption"].finish_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
