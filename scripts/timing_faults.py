"""Faults in running jobs, counted: what the agent says, of whom, and how soon.

    python scripts/timing_faults.py --job deepspeed:zero1:4 megatron:gpt-tp2pp2-dist:4 [--runs 10] [--seed 1] [--out docs/...]

Real jobs under torchrun, each with the agent that it starts itself; what counts is what this writes, as a person would read
it. Faults that a job survives are made one after the other in the same job, with sound steps between them, at random ranks;
those that it does not survive end their job. Whatever is said in sound stretches is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from tests.launch import REPO, environment, free_port
from unickpt.timing.ring import RingReader

HANG, SLOW = "non-communication hang", "non-communication slow"
MARK = "<!-- made by scripts/timing_faults.py -->"


@dataclass(frozen=True)
class Fault:
    """Attributes: name in the worker, its amount, the syndrome that it is, and whether the job goes on after it."""

    title: str
    name: str
    syndrome: str
    amount: float = 0.0
    survived: bool = True
    cause: str = ""


FAULTS = {
    fault.title: fault
    for fault in (
        Fault("SIGSTOP", "stop", HANG),
        Fault("endless loop", "loop", HANG),
        Fault("sleep 5 ms", "sleep", SLOW, 0.005, cause="compute"),
        Fault("sleep 20 ms", "sleep", SLOW, 0.02, cause="compute"),
        Fault("sleep 100 ms", "sleep", SLOW, 0.1, cause="compute"),
        Fault("slow data loader", "data", SLOW, 0.04, cause="data"),
        Fault("garbage collection", "garbage", SLOW, 3, cause="garbage collection"),
        Fault("CPU starvation", "starve", SLOW, cause="compute"),
        Fault("SIGKILL", "kill", HANG, survived=False),
        Fault("skipped collective", "skip", "deadlock between groups", survived=False),
        Fault("other shape", "reshape", "mismatched collectives", survived=False),
        Fault("deadlock", "deadlock", "deadlock between groups", survived=False),
    )
}
ENDLESS = ("SIG", "loop", "collective", "shape", "deadlock", "dead link")  # faults with a deadline
LIMIT_S = 40.0
QUIET_STEPS = 24  # sound steps between two faults: as many as are looked at


@dataclass
class Run:
    """One fault that was made: what was said first, and when."""

    job: str
    fault: str
    rank: int
    detected: bool = False
    syndrome: bool = False
    named: bool = False
    seconds: float = float("nan")
    beyond: float = float("nan")  # of a hang: seconds beyond the deadline
    steps: float = float("nan")
    said: str = ""


class Job:
    """A running job."""

    def __init__(self, kind: str, layout: str, world: int, folder: Path) -> None:
        self.world, self.folder, self.rings = world, folder, folder / "rings"
        self._number = 0
        self._output = (folder / "output").open("w")
        self.processes = self._start(kind, layout)

    def _start(self, kind: str, layout: str) -> list[subprocess.Popen[bytes]]:
        self.rings.mkdir(parents=True)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.world), "--master-addr", "127.0.0.1",
            "--master-port", str(free_port()), *self._worker(kind, layout, self.rings),
        ]  # fmt: skip
        return [self._process(command, GLOO_SOCKET_IFNAME="lo")]

    def _worker(self, kind: str, layout: str, rings: Path) -> list[str]:
        return ["-m", "tests.timing.faulty_job", kind, layout, str(rings), str(self.folder)]

    def _process(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=REPO, env=environment(**variables), stdout=self._output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def steps(self) -> list[int]:
        found = []
        for path in self.folder.glob("rings*/*.ring"):
            with contextlib.suppress(Exception):
                found.append(RingReader(path).snapshot(last=1).step)
        return found if len(found) == self.world else [0]

    def pid(self, rank: int) -> int:
        return RingReader(self.rings / f"{rank:05d}.ring").identity.pid

    def until_step(self, wanted: int, limit_s: float = 180) -> None:
        end = time.monotonic() + limit_s
        while min(self.steps()) < wanted:
            if time.monotonic() > end or any(each.poll() is not None for each in self.processes):
                text = (self.folder / "output").read_text()[-3000:]
                raise RuntimeError(f"the job has not come to step {wanted}:\n{text}")
            time.sleep(0.1)

    def said(self) -> list[dict[str, Any]]:
        path = self.rings / "verdicts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def tell(self, fault: str, rank: int, amount: float = 0.0, ahead: int = 0) -> int:
        self._number += 1
        step = max(self.steps()) + ahead
        fresh = self.folder / "now.new"
        fresh.write_text(json.dumps({"id": self._number, "fault": fault, "rank": rank, "amount": amount, "step": step}))
        fresh.replace(self.folder / "now")
        return self._number

    def begun(self, number: int) -> tuple[int, int] | None:
        with contextlib.suppress(OSError, ValueError):
            at, step = (self.folder / f"begun-{number}").read_text().split()
            return int(at), int(step)
        return None

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGKILL)
            process.wait()
        self._output.close()


def make(job: Job, name: str, fault: Fault, rank: int) -> Run:
    """One fault, until something is said of it."""
    run = Run(name, fault.title, rank)
    before = len(job.said())
    with doing(job, fault, rank) as since:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            new = job.said()[before:]
            if new:
                judge(run, fault, new, since(), job)
                break
            time.sleep(0.1)
    return run


@contextlib.contextmanager
def doing(job: Job, fault: Fault, rank: int) -> Iterator[Any]:
    """The fault goes on inside; yields a function that tells when it began, and in which step."""
    if fault.name == "stop":
        pid, at = job.pid(rank), (time.time_ns(), max(job.steps()))
        os.kill(pid, signal.SIGSTOP)
        try:
            yield lambda: at
        finally:
            os.kill(pid, signal.SIGCONT)
    elif fault.name == "starve":
        pid, at, core = job.pid(rank), (time.time_ns(), max(job.steps())), random.randrange(os.cpu_count() or 1)
        everywhere = os.sched_getaffinity(0)
        greedy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            for each in greedy:
                os.sched_setaffinity(each.pid, {core})
                with contextlib.suppress(PermissionError):  # among equals, whoever sleeps often comes first
                    os.setpriority(os.PRIO_PROCESS, each.pid, -10)
            pin(pid, {core})
            yield lambda: at
        finally:
            for each in greedy:
                each.kill()
                each.wait()
            pin(pid, everywhere)
    else:
        number = job.tell(fault.name, rank, fault.amount, ahead=4)
        try:
            yield lambda: job.begun(number) or (time.time_ns(), 0)
        finally:
            if fault.survived:
                job.tell("none", -1)


def pin(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def judge(run: Run, fault: Fault, said: list[dict[str, Any]], since: tuple[int, int], job: Job) -> None:
    first = said[0]
    run.detected, run.said = True, first["told"]
    run.syndrome = first["syndrome"] == fault.syndrome and fault.cause in first["told"]
    run.named = first["ranks"] == [run.rank]
    run.seconds = (first["at_ns"] - since[0]) / 1e9
    run.beyond = run.seconds - first["deadline_s"]
    run.steps = max(job.steps()) - since[1]


def measure(
    kind: str, layout: str, world: int, titles: list[str], runs: int, chance: random.Random
) -> tuple[list[Run], int, int]:
    """All runs of a job; and how many sound stretches there were, in how many of which something was said."""
    name = f"{kind} {layout}, {world} ranks"
    gentle = [FAULTS[title] for title in titles if FAULTS[title].survived for _ in range(runs)]
    hard = [FAULTS[title] for title in titles if not FAULTS[title].survived for _ in range(runs)]
    chance.shuffle(gentle)
    found: list[Run] = []
    sound = alarms = 0
    jobs = max(len(hard), 1)
    share = -(-len(gentle) // jobs)
    for at in range(jobs):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            job = Job(kind, layout, world, Path(place))
            try:
                job.until_step(30)
                for fault in [*gentle[at * share : (at + 1) * share], *hard[at : at + 1]]:
                    quiet = len(job.said())
                    job.until_step(max(job.steps()) + QUIET_STEPS)
                    sound += 1
                    if len(job.said()) > quiet:
                        alarms += 1
                        print(f"FALSE ALARM: {job.said()[-1]['told']}", flush=True)
                    run = make(job, name, fault, chance.randrange(world))
                    found.append(run)
                    print(json.dumps(dataclasses.asdict(run)), flush=True)
                    if fault.survived:
                        settle(job)
            except RuntimeError as err:
                print(f"{name}: {err}", flush=True)
            finally:
                job.close()
    return found, sound, alarms


def settle(job: Job) -> None:
    """Until the steps that the fault was in are not looked at any more, and its verdict can be said anew."""
    job.until_step(max(job.steps()) + QUIET_STEPS)
    time.sleep(7)


def table_of(runs: list[Run], order: list[str]) -> list[str]:
    """Markdown, a row for each job and fault, in the order given."""
    lines = [
        "| job | fault | runs | detected | syndrome right | rank or link right | seconds | beyond the deadline | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.job, run.fault].append(run)
    for (job, fault), each in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        seen = [run for run in each if run.detected]
        hang = any(word in fault for word in ENDLESS)
        lines.append(
            f"| {job} | {fault} | {len(each)} | {len(seen)} | {sum(r.syndrome for r in each)} | {sum(r.named for r in each)} "
            f"| {spread([r.seconds for r in seen])} | {spread([r.beyond for r in seen]) if hang else ''} "
            f"| {'' if hang else spread([r.steps for r in seen])} |"
        )
    return lines


def put(path: Path, mark: str, text: str) -> None:
    """Replace what stands below a mark in a document, up to the next script's mark; add both if it is not there."""
    before, _, after = path.read_text().partition(mark) if path.is_file() else ("", "", "")
    _, begins, others = after.partition("<!-- made by")
    path.write_text(f"{before.rstrip()}\n\n{mark}\n\n{text.rstrip()}\n" + (f"\n{begins}{others}" if begins else ""))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", nargs="+", default=["deepspeed:zero1:4", "megatron:gpt-tp2pp2-dist:4"])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown file whose part below the mark is replaced")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the jobs end with this
    runs: list[Run] = []
    lines = [f"`python scripts/timing_faults.py {' '.join(sys.argv[1:])}`, Python {platform.python_version()}, "
             f"{platform.system()}, {os.cpu_count()} cores.", ""]  # fmt: skip
    told = []
    for spec in args.job:
        kind, layout, world = spec.split(":")
        found, sound, alarms = measure(kind, layout, int(world), args.faults, args.runs, random.Random(args.seed))
        runs += found
        told.append(f"{kind} {layout}, {world} ranks: {sound} sound stretches of {QUIET_STEPS} steps or more, "
                    f"something was said in {alarms} of them.")  # fmt: skip
    text = "\n".join([*lines, *table_of(runs, list(FAULTS)), "", *told, ""])
    print(text)
    if args.out:
        put(args.out, MARK, text)


if __name__ == "__main__":
    main()
