"""Effective training time of a DeepSpeed job under a schedule of faults, beside stock torchrun.

    python -m evidence.steering.effective_time [--seconds 1800] [--faults 20] [--keep FILE] [--page FILE]
        [--backends unickpt,c10d,ft_launcher]

``SCHEDULE`` is repeated until the faults are made, at the same distances for each number of seconds: 20 faults in 1,800 s are
20 faults in an hour, compressed to a half.

``ft_launcher`` is that of NVIDIA Resiliency Extension (nvidia-resiliency-ext, on PYTHONPATH): the ranks send it heartbeats.

Effective time is the number of steps that the job has passed, times the time of a step without faults, over the time since the
first step. Work that is done again after a resume does not count. Needs root (``namespaces.missing``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from evidence.steering.cluster import Cluster
from evidence.steering.deepspeed_job import HEARTBEATS
from evidence.steering.jobs import CONF, SETTINGS
from evidence.steering.timeline import steps_of
from tests.jobs.steering.namespaces import Network, missing
from unickpt.cli.main import main as unickpt

HOSTS = ("n1", "n2", "n3")
CYCLE_S = 150.0
FT_LAUNCHER = "ft_launcher"
FT_CONFIG = {"initial_rank_heartbeat_timeout": 60.0, "rank_heartbeat_timeout": 6.0, "log_level": "WARNING"}
BEGIN, FINISH = ("<!-- table: made by python -m evidence.steering.effective_time -->\n\n", "\n<!-- end of times -->")


@dataclass(frozen=True)
class Result:
    """One job.

    Attributes:
        backend: ``--rdzv-backend``.
        seconds: time since the first step.
        faults: faults that were made.
        steps: steps that the job has passed.
        step_s: median time of a step on all hosts, before the first fault.
        last_s: when the newest step was done, in seconds since the first one.
    """

    backend: str
    seconds: float
    faults: int
    steps: int
    step_s: float
    last_s: float

    @property
    def effective(self) -> float:
        """Effective part of the time."""
        return min(1.0, self.steps * self.step_s / self.seconds)


def _pid(job: Cluster, host: str) -> int:
    """Return the newest worker of a host."""
    return int([each["pid"] for each in job.events() if each["what"] == "started" and each["host"] == host][-1])


def _signal(job: Cluster, host: str, number: signal.Signals) -> None:
    os.kill(_pid(job, host), number)


def _admit(job: Cluster, host: str) -> None:
    if job.backend == "unickpt":
        unickpt(["hosts", "admit", host, "--rdzv-endpoint", job.endpoint, "--rdzv-id", job.identifier])


Action = tuple[float, bool, str, Callable[[Cluster], None]]

# What happens in each cycle of CYCLE_S: seconds after its beginning, whether it is a fault, and what is done.
SCHEDULE: tuple[Action, ...] = (
    (15, True, "SIGKILL of the rank on n3", lambda job: _signal(job, "n3", signal.SIGKILL)),
    (45, True, "SIGSTOP of the rank on n2", lambda job: _signal(job, "n2", signal.SIGSTOP)),
    (75, False, "a person admits n2", lambda job: _admit(job, "n2")),
    (95, True, "n3 loses its power", lambda job: job.lose("n3")),
    (112, False, "n3 is started again", lambda job: job.restore("n3")),
)
FAULTS = sum(is_fault for _, is_fault, _, _ in SCHEDULE)  # of a cycle


def planned(seconds: float, faults: int) -> list[Action]:
    """Return what happens in a job: the cycles as long as faults and time ask for, without what follows the last fault."""
    scale = seconds * FAULTS / faults / CYCLE_S
    cycles = range(-(-faults // FAULTS))
    every = [
        ((cycle * CYCLE_S + at) * scale, is_fault, title, act) for cycle in cycles for at, is_fault, title, act in SCHEDULE
    ]
    made = itertools.accumulate(is_fault for _, is_fault, _, _ in every)
    return [each for each, number in zip(every, made, strict=True) if number <= faults and each[0] < seconds]


def measure(backend: str, seconds: float, faults: int) -> Result:
    """Run a job with the schedule."""
    with tempfile.TemporaryDirectory() as folder:
        network = Network(HOSTS)
        job = Cluster(Path(folder), network, "1:3", SETTINGS["deepspeed"].program(Path(folder)), CONF, "n1")
        job.backend = backend
        if backend != "unickpt":  # else torch uses the store of the last round again
            job.more["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if backend == FT_LAUNCHER:
            job.launcher, job.backend = "nvidia_resiliency_ext.fault_tolerance.launcher", "c10d"
            job.more[HEARTBEATS] = "1"
            place = Path(folder) / "ft.yaml"
            place.write_text(json.dumps({"fault_tolerance": FT_CONFIG}))
            job.arguments = ["--ft-cfg-path", str(place)]
        try:
            for name in HOSTS:
                job.run(name)
            if not job.until(lambda: job.step() >= 1):
                raise AssertionError(f"the job does not start\n{job.text()}")
            return _with_faults(job, backend, seconds, planned(seconds, faults))
        finally:
            job.close()
            network.close()


def _with_faults(job: Cluster, backend: str, seconds: float, plan: list[Action]) -> Result:
    began_s, faults = time.time(), 0
    for at_s, is_fault, title, act in plan:
        time.sleep(max(0.0, began_s + at_s - time.time()))
        try:
            act(job)
            faults += is_fault
            print(f"{backend} {at_s:.0f} s: {title}; step {job.step()}", flush=True)
        except (KeyError, IndexError, OSError, psutil.Error) as err:  # there is nothing left to break or to mend
            print(f"{backend} {at_s:.0f} s: {title}: not possible ({type(err).__name__}: {err})", flush=True)
    time.sleep(max(0.0, began_s + seconds - time.time()))
    passed, took_s = job.step(), time.time() - began_s
    every = [step for steps in steps_of(job.folder).values() for step in steps.values()]
    before = sorted(step.last_s for step in every if step.last_s < began_s + plan[0][0] and step.ranks == len(HOSTS))
    step_s = statistics.median(later - sooner for sooner, later in itertools.pairwise(before))
    last_s = max(step.last_s for step in every) - began_s
    return Result(backend, took_s, faults, passed, step_s, last_s)


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| backend | time | faults | steps | step without faults | last step at | effective |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{each.backend}` | {each.seconds:.0f} s | {each.faults} | {each.steps} | {each.step_s * 1000:.0f} ms | "
        f"{each.last_s:.0f} s | {each.effective:.0%} |"
        for each in results
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--faults", type=int, help=f"in this time; {FAULTS} for each {CYCLE_S:.0f} s if not given")
    parser.add_argument("--backends", default="unickpt,c10d")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for backend in args.backends.split(","):
        results.append(measure(backend, args.seconds, args.faults or FAULTS * max(1, int(args.seconds // CYCLE_S))))
        print(results[-1], flush=True)
        if args.keep is not None:
            with args.keep.open("a") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    print(table(results))
    if args.page is not None:
        head, rest = args.page.read_text().split(BEGIN, 1)
        args.page.write_text(head + BEGIN + table(results) + "\n" + FINISH + rest.split(FINISH, 1)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
