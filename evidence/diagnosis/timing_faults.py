"""Faults in running jobs, counted: what the agent says, of whom, and how soon.

    python -m evidence.diagnosis.timing_faults --job deepspeed:zero1:4 megatron:gpt-tp2pp2-dist:4
        [--runs 10] [--seed 1] [--keep FILE]

Real jobs under torchrun, each with the agent that it starts itself; what counts is what this writes, as a person would read
it. Faults that a job survives are made one after the other in the same job, with sound steps between them, at random ranks;
those that it does not survive end their job. Whatever is said in sound stretches is a false alarm. ``timing_counts.py`` makes
tables of what is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.diagnosis.timing_counts import QUIET_STEPS, Kept, Run, Sound
from tests.support.repository import REPO
from unickpt.diagnosis.recording.ring import RingReader
from unickpt.testing import launch
from unickpt.testing.launch import environment

HANG, SLOW = "non-communication hang", "non-communication slow"


@dataclass(frozen=True)
class Fault:
    """Attributes: name in the worker, its amount, the syndrome that it is, and whether the job goes on after it; a hang has a
    deadline."""

    title: str
    name: str
    syndrome: str
    amount: float = 0.0
    survived: bool = True
    cause: str = ""
    other: str = ""  # syndrome that it may be as well: what comes next may be a call of the same group

    @property
    def hangs(self) -> bool:
        return "slow" not in self.syndrome


FAULTS = {
    fault.title: fault
    for fault in (
        Fault("SIGSTOP", "stop", HANG),
        Fault("endless loop in a forward", "loop", HANG),
        Fault("5 ms late to every call", "sleep", SLOW, 0.005, cause="compute"),
        Fault("20 ms late to every call", "sleep", SLOW, 0.02, cause="compute"),
        Fault("100 ms late to every call", "sleep", SLOW, 0.1, cause="compute"),
        Fault("slow data loader", "data", SLOW, 0.04, cause="data"),
        Fault("garbage collection", "garbage", SLOW, 3, cause="garbage collection"),
        Fault("CPU starvation", "starve", SLOW, cause="compute"),
        Fault("SIGKILL", "kill", HANG, survived=False),
        Fault("skipped collective", "skip", "deadlock between groups", survived=False, other="mismatched collectives"),
        Fault("other shape", "reshape", "mismatched collectives", survived=False),
        Fault("deadlock", "deadlock", "deadlock between groups", survived=False),
    )
}
LIMIT_S = 120.0


class Job:
    """A running job."""

    def __init__(self, kind: str, layout: str, world: int, folder: Path) -> None:
        self.world, self.folder, self.rings = world, folder, folder / "rings"
        self._number = 0
        self._output = (folder / "output").open("w")
        self.processes = self._start(kind, layout)

    def _start(self, kind: str, layout: str) -> list[subprocess.Popen[str]]:
        self.rings.mkdir(parents=True)
        return [self._process(launch.command(self.world, *self._worker(kind, layout, self.rings)), GLOO_SOCKET_IFNAME="lo")]

    def _worker(self, kind: str, layout: str, rings: Path) -> list[str]:
        return ["-m", "evidence.diagnosis.faulty_job", kind, layout, str(rings), str(self.folder)]

    def _process(self, arguments: list[str], **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            arguments,
            cwd=REPO,
            env=environment(REPO, **variables),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def steps(self) -> list[int]:
        found = []
        for path in self.folder.glob("rings*/*.ring"):
            with contextlib.suppress(Exception):
                found.append(RingReader(path).read(last=1).step)
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
            launch.end(process)
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
        greedy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)]
        try:
            for each in greedy:
                os.sched_setaffinity(each.pid, {core})
                os.setpriority(os.PRIO_PROCESS, each.pid, -15)  # among equals, whoever sleeps often comes first (needs root)
                with contextlib.suppress(OSError):  # sched(7): sessions are equals, whatever their processes are
                    Path(f"/proc/{each.pid}/autogroup").write_text("-15")
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
    run.detected, run.said = True, first["sentence"]
    run.syndrome = first["syndrome"] in (fault.syndrome, fault.other or fault.syndrome) and fault.cause in ("", first["cause"])
    run.named = first["ranks"] == [run.rank]
    run.seconds = (first["at_ns"] - since[0]) / 1e9
    run.beyond = run.seconds - first["deadline_s"]
    run.steps = max(job.steps()) - since[1]


def measure(spec: str, titles: list[str], runs: int, chance: random.Random, kept: Kept) -> None:
    """All runs of a job, and the sound stretches between them."""
    kind, layout, world = spec.split(":")
    name = f"{kind} {layout}, {world} ranks"
    gentle = [FAULTS[title] for title in titles if FAULTS[title].survived for _ in range(runs)]
    hard = [FAULTS[title] for title in titles if not FAULTS[title].survived for _ in range(runs)]
    chance.shuffle(gentle)
    jobs = max(len(hard), 1)
    share = -(-len(gentle) // jobs)
    for at in range(jobs):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            job = Job(kind, layout, int(world), Path(place))
            try:
                job.until_step(30)
                for fault in [*gentle[at * share : (at + 1) * share], *hard[at : at + 1]]:
                    kept.add(sound_stretch(job, name))
                    kept.add(make(job, name, fault, chance.randrange(int(world))))
                    if fault.survived:
                        settle(job)
            except RuntimeError as err:
                print(f"{name}: {err}", flush=True)
            finally:
                job.close()


def sound_stretch(job: Job, name: str) -> Sound:
    """Some steps without a fault."""
    before = len(job.said())
    job.until_step(max(job.steps()) + QUIET_STEPS)
    return Sound(name, "; ".join(each["sentence"] for each in job.said()[before:]))


def settle(job: Job) -> None:
    """Until the steps that the fault was in are not looked at any more, and its verdict can be said anew."""
    job.until_step(max(job.steps()) + QUIET_STEPS)
    time.sleep(7)


def parser_of(description: str, faults: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return a parser for the arguments of a program that makes faults. Makes SIGTERM end the program and its jobs."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--faults", nargs="+", default=list(faults), choices=faults)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="JSON lines file that gets the results")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return parser


def main() -> None:
    parser = parser_of(__doc__ or "", FAULTS)
    parser.add_argument("--job", nargs="+", default=["deepspeed:zero1:4", "megatron:gpt-tp2pp2-dist:4"])
    args = parser.parse_args()
    kept = Kept(args.keep, f"python -m evidence.diagnosis.timing_faults {' '.join(sys.argv[1:])}")
    for spec in args.job:
        measure(spec, args.faults, args.runs, random.Random(args.seed), kept)


if __name__ == "__main__":
    main()
