"""Four cases in which torchrun's own rendezvous does not repair a job. This file uses torch alone, so it can be sent upstream.

    python evidence/steering/torch_defects.py [CASE ...] [--backend c10d] [--seconds 90]

Every case starts agents of torchrun on this machine. The workers add numbers with gloo. The case is passed if the workers
go on as it says within ``--seconds``.

restart     ``--nnodes 1``: one of two workers raises. Both should be restarted and go on. c10d: ``--standalone``.
grow        ``--nnodes 1:2``: a second agent comes. Both should go on together.
lost        ``--nnodes 1:2``: one host is lost: its agent is killed, and its worker is stopped, so that no connection is reset.
            The other one should go on alone.
first-lost  ``--nnodes 2:3``: the host of rank 0 is killed. The others should go on, with one MASTER_ADDR that lives.

With ``--backend c10d``, the store of the other cases is in this process and outlives all agents.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

WORKER = """
import datetime, os, pathlib, sys, time
import torch, torch.distributed as dist
folder, raises = pathlib.Path(sys.argv[1]), sys.argv[2] == "raises"
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def tell(*what):
    with (folder / "told").open("a") as file:
        file.write(" ".join(map(str, what)) + chr(10))
tell("start", os.getpid(), sys.argv[3], rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
for step in range(1 << 20):
    dist.all_reduce(torch.ones(1))
    tell("step", os.getpid(), sys.argv[3], rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
    if raises and step == 5 and rank == "1" and not (folder / "raised").exists():
        (folder / "raised").touch()
        raise SystemExit("a worker fails")
    time.sleep(0.1)
"""
GOES_ON = 5  # steps


class Job:
    """Agents of one job.

    Args:
        folder: empty folder.
        backend: ``--rdzv-backend``.
        nodes: ``--nnodes``.
        raises: a worker raises.
    """

    def __init__(self, folder: Path, backend: str, nodes: str, *, raises: bool = False, workers: int = 1) -> None:
        self._folder, self._backend, self._nodes, self._workers = folder, backend, nodes, workers
        self._raises = "raises" if raises else "-"
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self._alone = backend == "c10d" and nodes == "1"
        if backend == "c10d" and not self._alone:
            self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        (folder / "worker.py").write_text(WORKER)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        """Start the agent of a host with this address of the loop-back interface."""
        conf = (
            f"host={address},join_seconds=2,expiry_seconds=6" if self._backend == "unickpt" else "is_host=0,last_call_timeout=5"
        )
        backend = [
            "--rdzv-backend", self._backend, "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-conf",
            conf, "--local-addr", address,
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", self._nodes, "--nproc-per-node", str(self._workers),
            *(["--standalone"] if self._alone else backend), "--max-restarts", "5", str(self._folder / "worker.py"),
            str(self._folder), self._raises, address,
        ]  # fmt: skip
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{address}.log").open("wb") as log:
            self._agents[address] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def told(self) -> list[tuple[str, int, str, int, int, str]]:
        """Return what workers have told: event, process, host, rank, world size, MASTER_ADDR."""
        file = self._folder / "told"
        words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(w[0], int(w[1]), w[2], int(w[3]), int(w[4]), w[5]) for w in words if len(w) == 6]

    def goes_on(self, world: int, seconds: float, before: int = 0) -> float | None:
        """Wait until every rank of a world of this size has made some steps after the first ``before`` lines.

        Returns:
            Seconds that this took; None if it does not happen or if all agents have ended.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            made: dict[int, int] = {}
            for event, process, _, _, size, _ in self.told()[before:]:
                if event == "step" and size == world:
                    made[process] = made.get(process, 0) + 1
            if sum(count >= GOES_ON for count in made.values()) >= world:
                return time.monotonic() - begin
            if all(agent.poll() is not None for agent in self._agents.values()):
                return None
            time.sleep(0.1)
        return None

    def lose(self, address: str, *, silently: bool) -> None:
        """Kill the host with this address; ``silently``: its worker is stopped, so that its connections stay open."""
        mine = [process for event, process, host, *_ in self.told() if event == "start" and host == address]
        agent = self._agents.pop(address)
        for process in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP if silently else signal.SIGKILL)
        agent.kill()
        agent.wait()

    def has_raised(self) -> bool:
        return (self._folder / "raised").exists()

    def close(self) -> None:
        for agent in self._agents.values():
            agent.kill()
            agent.wait()
        for _, process, *_ in self.told():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def last_error(self) -> str:
        """Return the last line of a log that names an error."""
        lines = [line for log in self._folder.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
        found = [line for line in lines if "Error" in line or "Exception" in line]
        return found[-1].strip()[:160] if found else "no error is logged"


def restart(job: Job, seconds: float) -> str:
    job.start("127.0.0.1")
    job.goes_on(2, seconds)
    end = time.monotonic() + seconds
    while not job.has_raised() and time.monotonic() < end:
        time.sleep(0.1)
    return verdict(job, job.goes_on(2, seconds, len(job.told())))


def grow(job: Job, seconds: float) -> str:
    job.start("127.0.0.1")
    job.goes_on(1, seconds)
    job.start("127.0.0.2")
    return verdict(job, job.goes_on(2, seconds))


def lost(job: Job, seconds: float) -> str:
    job.start("127.0.0.1")
    job.start("127.0.0.2")
    job.goes_on(2, seconds)
    second = next(host for _, _, host, rank, world, _ in job.told() if (rank, world) == (1, 2))
    job.lose(second, silently=True)
    return verdict(job, job.goes_on(1, seconds, len(job.told())))


def first_lost(job: Job, seconds: float) -> str:
    for at in (1, 2, 3):
        job.start(f"127.0.0.{at}")
    job.goes_on(3, seconds)
    first = next(host for _, _, host, rank, world, _ in job.told() if (rank, world) == (0, 3))
    job.lose(first, silently=False)
    before = len(job.told())
    found = job.goes_on(2, seconds, before)
    masters = sorted({master for event, _, _, _, _, master in job.told()[before:] if event == "start"})
    dead = f"; the lost host was {first}" if first in masters else ""
    return verdict(job, found) + f"; MASTER_ADDR of the workers started since: {', '.join(masters) or 'none'}{dead}"


def verdict(job: Job, seconds: float | None) -> str:
    return f"goes on after {seconds:.0f} s" if seconds is not None else f"does not go on ({job.last_error()})"


CASES = {
    "restart": (restart, "1", {"raises": True, "workers": 2}),
    "grow": (grow, "1:2", {}),
    "lost": (lost, "1:2", {}),
    "first-lost": (first_lost, "2:3", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--backend", default="c10d")
    parser.add_argument("--seconds", type=float, default=90.0)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, --rdzv-backend {args.backend}, at most {args.seconds:.0f} s", flush=True)
    for name in args.cases or CASES:
        case, nodes, more = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder), args.backend, nodes, **more)  # type: ignore[arg-type]
            try:
                print(f"{name}: {case(job, args.seconds)}", flush=True)
            finally:
                job.close()


if __name__ == "__main__":
    main()
