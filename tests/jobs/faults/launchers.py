"""kill -9 of torchrun alone, which is started again at once: its workers must not go on beside those of the next start."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jobs.faults.launcher_worker import STAYS
from tests.jobs.faults.tally import Tally, spread
from tests.support.repository import REPO
from unickpt.base.process_identity import ProcessIdentity
from unickpt.testing.launch import environment, free_port

PATIENCE_S = 400.0  # imports on a busy machine
STEP_S, WORLD = 0.05, 2


class Job:
    """Agents of one job on this machine. ``backend``: ``unickpt`` with two agents, or ``c10d`` with one."""

    def __init__(self, folder: Path, backend: str, stays: bool = False) -> None:
        self.folder, self.backend, self.port = folder, backend, free_port()
        self.names = ("n1", "n2") if backend == "unickpt" else ("n1",)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # worker 0 opens the store, so that it does not end with the launcher
        self.variables = {STAYS: "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if stays else {}
        folder.mkdir(parents=True)

    def start(self, name: str, **variables: str) -> None:
        """Start an agent."""
        ours = ["--rdzv-conf", f"host={name},join_seconds=1,self_check=false,expiry_seconds=20"]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.names)), "--nproc-per-node",
            str(WORLD // len(self.names)), "--rdzv-backend", self.backend, "--rdzv-id", f"faults{self.port}", "--rdzv-endpoint",
            f"localhost:{self.port}", *(ours if self.backend == "unickpt" else []), "--max-restarts", "1000", "-m",
            "tests.jobs.faults.launcher_worker", str(self.folder), str(STEP_S),
        ]  # fmt: skip
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.running[name] = subprocess.Popen(
                command, cwd=REPO, env=environment(REPO, **variables), stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill an agent alone."""
        agent = self.running.pop(name)
        agent.kill()
        agent.wait()

    def lines(self, what: str = "") -> list[dict[str, Any]]:
        """Return what the starts have written down."""
        with contextlib.suppress(OSError):
            found = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
            return [line for line in found if what in ("", line["what"])]
        return []

    def resumed_since(self, at_ns: int) -> dict[str, Any] | None:
        """Return the first resume of a start whose workers have begun after a time."""
        fresh = {line["copy"] for line in self.lines("begins") if line["at_ns"] > at_ns}
        return next((line for line in self.lines("resumed") if line["copy"] in fresh), None)

    def workers(self) -> list[int]:
        """Return the workers that live."""
        with contextlib.suppress(OSError):
            pids = [int(line) for line in (self.folder / "pids").read_text().split()]
            return [pid for pid in pids if ProcessIdentity.of(pid) is not None]
        return []

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait.

        Raises:
            TimeoutError: the job hangs.
        """
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError("".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.txt")))
            time.sleep(0.02)

    def close(self) -> None:
        """Kill everything."""
        for agent in self.running.values():
            agent.kill()
            agent.wait()
        for pid in self.workers():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for folder in Path("/dev/shm").glob(f"unickpt-{os.geteuid()}-faults{self.port}-*"):
            shutil.rmtree(folder, ignore_errors=True)


HOW = f"{WORLD} ranks save at every step of {STEP_S} s; one torchrun is killed at a random time and started again at once"


def agents(folder: Path, count: int, seed: int) -> list[Tally]:
    """One of two agents of ``--rdzv-backend unickpt`` is killed alone, again and again."""
    tally = Tally("kill -9 of an agent alone", f"`--rdzv-backend unickpt`, two agents with one rank each: {HOW}")
    return _counted(Job(folder / "job", "unickpt"), tally, count, seed)


def launchers(folder: Path, count: int, seed: int) -> list[Tally]:
    """The only launcher of a job without steering is killed alone, again and again."""
    tally = Tally("kill -9 of the launcher alone", f"`--rdzv-backend c10d`, one launcher: {HOW}")
    return _counted(Job(folder / "job", "c10d"), tally, count, seed)


def outlived(folder: Path, count: int, seed: int) -> list[Tally]:
    """The same, and nothing ends its workers, as on a host that nobody reaches."""
    tally = Tally("kill -9 of the launcher alone, its workers live on", f"`--rdzv-backend c10d`, nothing ends workers: {HOW}")
    return _counted(Job(folder / "job", "c10d", stays=True), tally, count, seed)


def _counted(job: Job, tally: Tally, count: int, seed: int) -> list[Tally]:
    try:
        _kills(job, tally, count, random.Random(seed))
    except TimeoutError as late:
        tally.deaths.append(f"the job hangs: {late}")
    finally:
        job.close()
    return [tally]


def _kills(job: Job, tally: Tally, count: int, chance: random.Random) -> None:
    places: Counter[str] = Counter()
    for name in job.names:
        job.start(name, **job.variables)
    job.until(lambda: len(job.lines("committed")) >= 2)
    period_s = start_s = 2.0
    for number in range(count):
        since, before = time.monotonic(), len(job.lines("resumed"))
        time.sleep(chance.uniform(0.0, period_s))
        places["training"] += 1
        victim = chance.choice(job.names)
        old = job.workers()
        job.kill(victim)
        killed_ns = time.time_ns()
        job.start(victim, **job.variables)
        if number % 4 == 1 and not job.variables:  # once more, before the job has resumed
            time.sleep(chance.uniform(0.0, start_s))
            places["start or resume" if len(job.lines("resumed")) == before else "training"] += 1
            victim = chance.choice(job.names)
            job.kill(victim)
            killed_ns = time.time_ns()
            job.start(victim, **job.variables)
        job.until(lambda: job.resumed_since(killed_ns))  # noqa: B023
        start_s = min(time.monotonic() - since, 20.0)
        fresh = job.resumed_since(killed_ns) or {}
        if number % 2 == 0:  # otherwise the next kill may come before the first save
            job.until(lambda: any(line["copy"] == fresh["copy"] for line in job.lines("committed")))  # noqa: B023
        if not job.variables and set(old) & set(job.workers()):
            tally.deaths.append(f"kill {number}: workers {sorted(set(old) & set(job.workers()))} live beside the next start")
        period_s = min(max(time.monotonic() - since, 1.0), 20.0)
    last = job.lines("resumed")[-1]["copy"]
    job.until(lambda: any(line["copy"] == last for line in job.lines("committed")))
    if job.variables:  # all but the last copy have been refused, and their programs end with that
        job.until(lambda: len(job.workers()) == WORLD)
    (job.folder / "stop").touch()
    job.until(lambda: not job.workers())
    judge(job.lines(), tally, bool(job.variables))
    tally.notes.append(f"when: {spread(places)}; saves committed: {len(job.lines('committed')):,}")


def judge(lines: list[dict[str, Any]], tally: Tally, outlives: bool) -> None:
    """Compare what the starts have written down.

    A start resumes from the newest checkpoint, bit for bit. From then on (if the workers before it live on: from its first
    commit on) no earlier one commits.
    """
    committed = [line for line in lines if line["what"] == "committed"]
    for at, resumed in enumerate(line for line in lines if line["what"] == "resumed"):
        own = [line["made_ns"] for line in committed if line["copy"] == resumed["copy"]]
        begun_ns = next(line["at_ns"] for line in lines if line["copy"] == resumed["copy"])
        newest = max((line["step"] for line in committed if line["made_ns"] < begun_ns), default=0)
        if resumed["wrong"]:
            tally.wrong.append(f"start {at}: {resumed}")
        if resumed["step"] < newest:
            tally.lost.append(f"start {at}: step {newest} was committed, {resumed}")
        earlier = {line["copy"] for line in lines if line["what"] == "begins" and line["at_ns"] < begun_ns}
        since_ns = min(own, default=None) if outlives else resumed["at_ns"]
        for line in committed:
            if since_ns is not None and line["copy"] in earlier and line["made_ns"] > since_ns:
                tally.lost.append(f"start {at}: two copies write: {line} after {resumed}")
        if at:
            tally.outcomes["resumed from the newest checkpoint, one copy writes"] += 1
    refused = sum(line["what"] == "refused" for line in lines)
    if refused:
        tally.notes.append(f"saves of earlier copies that were refused: {refused}")
