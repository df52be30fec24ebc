"""A soak: jobs of 16 ranks on four hosts, one after the other, with a fault every three minutes, in pieces.

    python -m evidence.sixty_four.soak --state FOLDER [--minutes 12] [--every 180] [--seed 1] [--only KIND ...]
        [--keep results/sixty-four-soak.jsonl] [--page docs/evidence/sixty-four.md]

Each call makes one piece, and goes on where the schedule of the last one has ended, also after a restart of the machine. All
that it needs for that is in FOLDER. Hosts are network namespaces with a shared memory of their own. Agents are those of
torchrun, unmodified. Ranks train with FSDP2 on gloo, save every 3 s into memory, and each fourth time on disk. The arithmetic
is exact, so every step and every state is compared, bit for bit, with an uninterrupted run in one process, whatever hosts have
done it.

Needs root, ``ip``, ``tc`` and ``mount``, and for ``--only clock clock-kill`` a C compiler. A fault that a piece was cut in is
made again by the next one.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.document import put, section
from evidence.sixty_four.soak import results
from evidence.sixty_four.soak.faults import KINDS
from evidence.sixty_four.soak.hosts import CLOCKS, ENDPOINT, NAMES, Held, Place, Soaked, growth, waited
from evidence.sixty_four.soak.judged import Row, make, wrong_numbers
from evidence.sixty_four.soak.worker_files import read_steps
from tests.jobs.steering import soak_arithmetic as exact
from tests.jobs.steering.namespaces import Network, missing

SECTION = "soak"
TITLE = """## Does a job of 16 ranks last for hours under faults?

Four hosts of four ranks, FSDP2, a checkpoint in memory every 3 s and each fourth on disk. Every step and every resumed
state is compared, bit for bit, with an uninterrupted run in one process. Possible steps are those without any fault: a start of
16 ranks takes 20 s and more of two cores.

**Not tested:** NCCL, several machines.
"""
STEPS, STEP_S = 2400, 0.3
START_S, STEADY_STEPS, NEEDED_STEPS = 400.0, 25, 300


class Piece:
    """One call of the command.

    Args:
        place: folder of the soak.
        seed: of the schedule.
        every_s: seconds between two faults.
        until_s: when no further fault is made, in seconds since 1970.
        only: kinds of faults; empty: as the schedule says.
        keep: further file for the rows, or None.
    """

    def __init__(
        self, place: Place, seed: int, every_s: float, until_s: float, only: Sequence[str], keep: Path | None
    ) -> None:  # fmt: skip
        self.place, self.seed, self.every_s, self.until_s, self.only, self.keep = place, seed, every_s, until_s, only, keep
        self.file = place.folder / "results.jsonl"
        self.expected = exact.reference(place.folder / "reference.jsonl", STEPS)
        self.network = Network(NAMES)
        place.note(self.network)
        self.rows, self.wrong = list[Row](), list[str]()
        self.useful, self.possible, self.compared, self.resumes, self.jobs = 0, 0.0, 0, 0, 0
        self.first: Held | None = None
        self.last: Held | None = None

    def run(self) -> dict[str, Any]:
        """Make faults until the time is over. Return the row of the piece."""
        begin = time.time()
        due = 0.0
        try:
            while time.time() < self.until_s:
                job, due = self._job(), max(due, time.time() + 20.0)
                try:
                    due = self._faults(job, due)
                    self._ended(job)
                finally:
                    job.close()
        finally:
            self.network.close()
        return {
            "row": "piece", "minutes": (time.time() - begin) / 60, "jobs": self.jobs, "faults": len(self.rows),
            "last": self.number() - 1, "useful_steps": self.useful, "possible_steps": self.possible,
            "compared": self.compared, "resumes": self.resumes, "wrong": "; ".join(dict.fromkeys(self.wrong)), "load": _load(),
            "held": growth(self.first, self.last) if self.first and self.last else {},
        }  # fmt: skip

    def number(self) -> int:
        """Return the number of the next fault."""
        return 1 + max((each["number"] for each in results.of(results.rows(self.file), "fault")), default=-1)

    def _job(self) -> Soaked:
        numbers = [int(each.name) for each in (self.place.folder / "jobs").iterdir() if each.name.isdigit()]
        clocks = any(each in CLOCKS for each in self.only)
        job = Soaked(self.place, self.network, 1 + max(numbers, default=0), STEPS, STEP_S, clocks=clocks)
        self.jobs += 1
        for host in NAMES:
            self.place.forget(host)
        for host in (ENDPOINT, *(each for each in NAMES if each != ENDPOINT)):
            job.run(host)
        if not waited(lambda: self._steady(job, 5), START_S):
            job.close()
            raise AssertionError(f"the job does not start\n{job.text()}")
        return job

    def _steady(self, job: Soaked, steps: int) -> bool:
        """Whether all hosts have done some steps in the newest round, and are doing them now."""
        now = job.round_now()
        if now is None or now[1] != set(NAMES):
            return False
        return len(read_steps(job.folder).rounds[now[0]]) >= steps and time.time() - now[2] < 5.0

    def _faults(self, job: Soaked, due: float) -> float:
        """Make faults in a job until it has too few steps left, something is wrong with it, or the time is over."""
        while time.time() < self.until_s and job.step() < STEPS - NEEDED_STEPS:
            if not waited(lambda: self._steady(job, STEADY_STEPS), START_S):
                self.wrong.append(f"job {job.number} does not go on")
                break
            while time.time() < due and time.time() < self.until_s and job.step() < STEPS - NEEDED_STEPS:
                time.sleep(1.0)
            if time.time() < due:
                break
            self.last = job.held()
            self.first = self.first or self.last
            due = max(due + self.every_s, time.time())
            row = make(job, self.number(), self.seed, self.expected, self.only)
            self._keep({"row": "fault", **asdict(row)})
            self.rows.append(row)
            print(f"{row.number} {row.kind} {row.hosts}: {row.problems or 'right'}; {row.works_s} s, {row.all_s} s", flush=True)
            if row.problems:
                self._kept_logs(job, row)
            if any("work" in each or "no round" in each for each in row.problems):
                break  # this job is lost
        return due

    def _ended(self, job: Soaked) -> None:
        """Let a job end, and compare it with the uninterrupted run."""
        (job.folder / "stop").touch()
        if job.step() < STEPS - NEEDED_STEPS or not waited(job.over, NEEDED_STEPS * STEP_S * 4, 1.0):
            waited(job.over, 120.0, 0.5)
        codes = {name: agent.poll() for name, agent in job.running.items()}
        if set(codes.values()) != {0}:
            self.wrong.append(f"job {job.number} ends with {codes}")
            self._kept_logs(job, None)
        self.wrong += wrong_numbers(job, self.expected)
        rounds = read_steps(job.folder).read()
        lines = [line for each in rounds.values() for line in each]
        last = max((line[0] for line in lines), default=0)
        if lines and not lines[-1][3]:
            self.wrong.append(f"job {job.number}: the last state is not known")
        self.compared += len(lines)
        self.resumes += sum(each["what"] == "resumed" and each["step"] > 0 for each in job.events())
        self.useful += last
        self.possible += (lines[-1][4] - lines[0][4]) / step_s(rounds) + 1 if lines else 0
        if not self.wrong and not any(row.problems for row in self.rows if row.job == job.number):
            for path in job.outputs:
                path.unlink()
        shutil.rmtree(job.checkpoints, ignore_errors=True)

    def _keep(self, row: Mapping[str, Any]) -> None:
        for file in (self.file, self.keep):
            if file is not None:
                results.append(file, row)

    def _kept_logs(self, job: Soaked, row: Row | None) -> None:
        at = self.place.folder / "wrong" / (f"fault{row.number}-{row.kind}" if row is not None else f"job{job.number}")
        at.mkdir(parents=True, exist_ok=True)
        for path in [*job.outputs, job.folder / "events.jsonl"]:
            shutil.copy(path, at)
        if row is not None:
            (at / "row.txt").write_text("\n".join(map(str, asdict(row).items())))


def step_s(rounds: Mapping[str, Sequence[Sequence[Any]]]) -> float:
    """Return the median time of a step in the rounds of a job."""
    gaps = [b[4] - a[4] for lines in rounds.values() for a, b in itertools.pairwise(lines)]
    return statistics.median(gaps) if gaps else STEP_S


def _load() -> float:
    return round(float(Path("/proc/loadavg").read_text().split()[2]), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--every", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=[])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    until_s = time.time() + 60 * args.minutes
    if why := missing() if args.minutes > 0 else "":
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = Place(args.state)
    if args.minutes > 0:
        left = place.clear()
        print(f"{left} processes of an earlier piece were left", flush=True)
        try:
            place.mount()
            piece = Piece(place, args.seed, args.every, until_s, args.only, args.keep)
            row = piece.run()
            for file in (piece.file, args.keep):
                if file is not None:
                    results.append(file, row)
            print(row, flush=True)
        finally:
            place.clear()
    every = results.rows(args.keep or place.folder / "results.jsonl")
    print(results.tables(every))
    if args.page:
        if f"<!-- {SECTION} -->" not in args.page.read_text():
            args.page.write_text(f"{args.page.read_text()}\n{TITLE}")
        put(args.page, SECTION, section(SECTION, "python -m evidence.sixty_four.soak", results.tables(every)))
    wrong = any(each.get("problems") or each.get("wrong") for each in every)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
