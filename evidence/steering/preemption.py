"""Random SIGTERMs in jobs of three frameworks on three hosts: all ranks save one step, and the resume is exact.

    python -m evidence.steering.preemption --keep FILE [--framework torch,deepspeed,megatron] [--count 7] [--seed 1]
        [--page FILE]

Hosts are agents of ``torchrun --rdzv-backend unickpt`` on one machine, with one rank each. A signal goes, at a random step, to
one agent, to all agents, to one rank, or to all agents and ranks at once, as Slurm sends it. What has ended is started again.
After the last step, the checkpoint is compared, bit for bit, with that of a job that nobody has interrupted. ``--page`` writes
the table of all runs in FILE. Megatron needs a tree: ``MEGATRON_LM=/path/to/Megatron-LM``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from evidence.document import put, section
from tests.jobs.steering.agents import Agents
from tests.support.repository import REPO
from unickpt.cli.main import main as unickpt
from unickpt.testing.launch import environment

HOSTS, STEPS, LIMIT_S = ("n1", "n2", "n3"), 460, 150.0
TARGETS = {
    "agent": "one agent",
    "agents": "all agents",
    "rank": "one rank",
    "all": "all agents and ranks, as Slurm does",
}
JOB = Path(__file__).with_name("preempted_job.py")
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


class Line(NamedTuple):
    """What a rank has written down."""

    event: str
    rank: int
    step: int
    pid: int
    at_s: float


@dataclass(frozen=True)
class Run:
    """One signal.

    Attributes:
        framework, target, seed: what was done.
        step: newest step of rank 0 when the signal was sent.
        saved: steps that the ranks have saved, in the order of the ranks.
        resumed: steps from which they went on.
        told_s: from the signal until the last rank began to save.
        ended_s: from the signal until the last process that was to end had ended.
        codes: exit codes of the agents that were to end.
        final: how the checkpoint of the last step of this job differs from that of the uninterrupted job; '' if it does not.
    """

    framework: str
    target: str
    seed: int
    step: int
    saved: tuple[int, ...]
    resumed: tuple[int, ...]
    told_s: float
    ended_s: float
    codes: tuple[int, ...]
    final: str

    @property
    def common(self) -> bool:
        """Whether all ranks have saved the same step, the newest one, and gone on from it."""
        return len(self.saved) == len(HOSTS) and len({*self.saved, *self.resumed}) == 1

    @property
    def right(self) -> bool:
        """Whether everything was as it must be."""
        return self.common and not self.final and all(code in (-signal.SIGTERM, 143) for code in self.codes)


class Interrupted(Agents):
    """A job that is told to end again and again."""

    def __init__(self, folder: Path, framework: str) -> None:
        super().__init__(folder, str(len(HOSTS)))
        self.program = [str(JOB), str(folder), framework, str(STEPS)]

    def variables(self, name: str) -> dict[str, str]:  # noqa: ARG002
        """See base class."""
        return VARIABLES

    def lines(self, event: str) -> list[Line]:
        """Return the lines of an event."""
        file = self.folder / "events"
        words = [line.split() for line in (file.read_text().splitlines() if file.exists() else [])]
        return [Line(each[0], *map(int, each[1:4]), float(each[4])) for each in words if len(each) == 5 and each[0] == event]

    def wait(self, event: str, count: int) -> list[Line]:
        """Wait for the n-th line of an event, and return those after the ones of the rounds before."""
        end_s = time.monotonic() + LIMIT_S
        while len(self.lines(event)) < count and time.monotonic() < end_s:
            time.sleep(0.05)
        return self.lines(event)[count - len(HOSTS) : count]

    def reach(self, step: int) -> None:
        """Wait for a step."""
        end_s = time.monotonic() + LIMIT_S
        while self.step() < step and time.monotonic() < end_s:
            time.sleep(0.01)

    def tell(self, target: str, source: random.Random) -> list[str]:
        """Send the signal. Return the agents that must end."""
        agents = list(self.running)
        one = source.choice(agents)
        ending = {"agent": [one], "agents": agents, "all": agents, "rank": []}[target]
        ranks = [line.pid for line in self.lines("start")[-len(HOSTS) :]]
        told = [self.running[name].pid for name in ending]
        told += {"rank": [source.choice(ranks)], "all": ranks}.get(target, [])
        source.shuffle(told)
        for pid in told:
            psutil.Process(pid).send_signal(signal.SIGTERM)
        return ending


def interrupt(job: Interrupted, framework: str, targets: Sequence[str], seed: int, source: random.Random) -> list[Run]:
    """Run a job to its last step, with signals on the way."""
    for name in HOSTS:
        job.start(name)
    job.wait("start", len(HOSTS))
    found, step = [], job.lines("start")[0].step if job.lines("start") else 0
    for number, target in enumerate(targets, 1):
        job.reach(step + source.randrange(8, STEPS // (len(targets) + 1)))
        time.sleep(source.random() * 0.1)
        at, sent_s = job.step(), time.time()
        ending = job.tell(target, source)
        saved = job.wait("save", number * len(HOSTS))
        codes = [job.running[name].wait(LIMIT_S) for name in ending]
        ended_s = time.time() - sent_s
        for name in ending:
            job.start(name)
        resumed = job.wait("start", (number + 1) * len(HOSTS))
        step = max((line.step for line in resumed), default=at)
        told_s = max((line.at_s for line in saved), default=sent_s) - sent_s
        by_rank = [tuple(line.step for line in sorted(lines, key=lambda each: each.rank)) for lines in (saved, resumed)]
        found.append(Run(framework, target, seed, at, *by_rank, told_s, ended_s if ending else 0.0, tuple(codes), "?"))
        print(found[-1], flush=True)
    for agent in job.running.values():
        agent.wait(LIMIT_S)
    return found


def reference(folder: Path, framework: str) -> Path:
    """Run the job without a signal, and return its last checkpoint."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(HOSTS))]
    variables = environment(REPO, **VARIABLES)
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*command, str(JOB), str(folder), framework, str(STEPS)], cwd=REPO, env=variables, stdout=log, stderr=log,
            check=True, timeout=4 * LIMIT_S,
        )  # fmt: skip
    return last(folder)


def last(folder: Path) -> Path:
    """Return the checkpoint of the last step."""
    return next(folder.glob(f"checkpoints/*{STEPS}"), folder / "checkpoints/none")


def kept(file: Path) -> list[Run]:
    """Return the runs of a file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [Run(**{key: tuple(value) if isinstance(value, list) else value for key, value in line.items()}) for line in lines]


def table(runs: Sequence[Run]) -> str:
    """Return the runs as a Markdown table, a row for each framework and target."""
    rows = [
        "| framework | SIGTERM to | runs | one common step, and the next start from it | signal -> last rank saves "
        "| signal -> agents have ended | last checkpoint equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for framework in dict.fromkeys(run.framework for run in runs):
        for target, words in TARGETS.items():
            those = [run for run in runs if (run.framework, run.target) == (framework, target)]
            if those:
                ended = f"{max(run.ended_s for run in those):.1f} s" if those[0].codes else "-"
                rows.append(
                    f"| {framework} | {words} | {len(those)} | {sum(run.common for run in those)} | at most "
                    f"{max(run.told_s for run in those):.1f} s | {'at most ' if those[0].codes else ''}{ended} | "
                    f"{sum(not run.final for run in those)} |"
                )
    good = sum(run.right for run in runs)
    return "\n".join([f"{good} of {len(runs)} are right.", "", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--framework", default="torch,deepspeed,megatron")
    parser.add_argument("--count", type=int, default=7, help="signals in each framework")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    for framework in args.framework.split(",") if args.count else ():
        source = random.Random(f"{args.seed} {framework}")
        targets = [*TARGETS, *source.choices(list(TARGETS), k=max(0, args.count - len(TARGETS)))][: args.count]
        source.shuffle(targets)
        with tempfile.TemporaryDirectory() as place:
            whole = reference(Path(place, "whole"), framework)
            folder = Path(place, "interrupted")
            folder.mkdir()
            job = Interrupted(folder, framework)
            try:
                runs = interrupt(job, framework, targets, args.seed, source)
                different = unickpt(["diff", str(whole), str(last(folder))])
                final = f"unickpt diff: {different}" if different else ""
                if not all(Run(**{**asdict(run), "final": final}).right for run in runs):
                    print(job.text())
            finally:
                job.close()
        with args.keep.open("a") as file:
            file.writelines(json.dumps({**asdict(run), "final": final}) + "\n" for run in runs)
    runs = kept(args.keep)
    print(table(runs))
    if args.page is not None:
        put(
            args.page,
            "preemption",
            section("preemption", "python -m evidence.steering.preemption --keep FILE --page PAGE", table(runs)),
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
