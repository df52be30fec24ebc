"""Random faults in jobs of DeepSpeed and Megatron under ``torchrun --rdzv-backend unickpt``, each host a network namespace.

    python -m evidence.steering.framework_faults --keep FILE [--framework deepspeed,zero3] [--scenarios A,B]
        [--count 1] [--seed 1] [--minutes 7] [--page FILE]

Needs root (``namespaces.missing``). Faults of ``plain`` jobs are made one after another in one job. After each of them, all
hosts return, and their return is a run as well. Scenarios with the fewest runs in the file come first, so that the command can
be repeated. ``--count`` is the wanted number of runs of each scenario in the file, in all of the given frameworks together,
which take turns. ``--page`` writes the table of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.steering.cluster import LIMIT_S, Cluster, View
from evidence.steering.jobs import CONF, KINDS, SETTINGS
from evidence.steering.readings import logged_s, verdict_s
from evidence.steering.run_table import Run, goals, kept, table, written
from evidence.steering.scenarios import ENDPOINT, RETURN, SCENARIOS, WATCH_S, Case, Scenario, choose
from evidence.steering.timeline import Comparison, Reference, compare, lineage, overlaps, reference_of, steps_of
from tests.jobs.steering.namespaces import Network, missing
from tests.support.repository import REPO
from unickpt.testing.launch import environment, free_port

FAULTS_OF_A_JOB = 6
MOST_ROUNDS = 5  # of a job whose retries are 2: one more may begin to pass the step that was noted


class Session:
    """Runs of one framework, which have one reference.

    Args:
        name: key of ``SETTINGS``.
        seed: of the random numbers.
        folder: for the reference, which is made once.
    """

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self.setting, self.seed = name, SETTINGS[name], seed
        self.source = random.Random(seed)
        self.reference = self._reference(folder)

    def _reference(self, folder: Path) -> Reference:
        """Run the job without a fault, on each number of ranks."""
        jobs = []
        for world in self.setting.worlds:
            at = folder / f"{self.name}-{world}"
            if not (at / "done").exists():
                at.mkdir(parents=True, exist_ok=True)
                program = self.setting.program(at, "--steps", str(self.setting.steps), "--pause", "0")
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nproc-per-node",
                    str(world),
                    "--master-port",
                    str(free_port()),
                    *program,
                ]
                subprocess.run(command, cwd=REPO, env=environment(REPO), check=True, timeout=300)
                (at / "done").touch()
            jobs.append(lineage(steps_of(at)))
        return reference_of(jobs)

    @contextmanager
    def job(self, nodes: str, hosts: int, conf: str = "", arguments: Sequence[str] = ()) -> Iterator[Cluster]:
        """Start a job on a number of hosts."""
        names = [f"n{number}" for number in range(1, hosts + 1)]
        with tempfile.TemporaryDirectory() as folder:
            network = Network(names)
            try:
                given = CONF + (f",{conf}" if conf else "")
                program = self.setting.program(Path(folder), *arguments)
                job = Cluster(Path(folder), network, nodes, program, given, ENDPOINT, self.setting.workers)
                try:
                    for name in [ENDPOINT, *(name for name in names if name != ENDPOINT)]:
                        job.run(name)
                    yield job
                finally:
                    job.close()
                    keep = os.environ.get("KEEP_LOGS")
                    if keep:
                        for path in [*job.outputs, Path(folder) / "events.jsonl"]:
                            target = Path(keep) / f"{self.seed}-{os.getpid()}-{job.port}-{path.name}"
                            target.write_bytes(path.read_bytes() if path.exists() else b"")
            finally:
                network.close()

    # ------------------------------------------------------------ plain jobs

    def row(self, names: Sequence[str]) -> Iterator[Run]:
        """Run scenarios one after another in one job, and the return of the hosts after each of them."""
        every = {f"n{number}" for number in range(1, self.setting.hosts + 1)}
        with self.job(f"1:{self.setting.hosts}", self.setting.hosts) as job:
            view = job.settled(every, (0, 0))
            if view is None:
                raise AssertionError(f"the job does not start\n{job.text()}")
            for name in names:
                scenario = SCENARIOS[name]
                job.until(lambda begin=view: job.step() >= begin.step + self.source.randint(15, 45))
                case = choose(scenario, job, view, self.source)
                step, fault_s, logged = job.step(), time.time(), _orders(job)
                scenario.act(case)
                if scenario.stays:
                    yield self._stays(name, case, step, fault_s, logged)
                    scenario.back(case)
                    job.go_on(5)
                    continue
                fault_s = self._made(job, fault_s)
                left = case.rest() if scenario.out else every
                later = job.settled(left, view.epoch)
                yield self._judged(name, case, step, fault_s, later, logged)
                if later is None:
                    return
                view = later
                if scenario.out:
                    job.go_on(SAVE_AND_MORE)
                    step, fault_s, logged = job.step(), time.time(), _orders(job)
                    scenario.back(case)
                    grown = job.settled(every, view.epoch)
                    yield self._judged(RETURN, case, step, fault_s, grown, logged)
                    if grown is None:
                        return
                    view = grown

    # ------------------------------------------------------------ jobs with one fault

    def special(self, name: str) -> Iterator[Run]:
        """Run a scenario that needs a job of its own."""
        scenario = SCENARIOS[name]
        kind = KINDS[scenario.kind]
        names = {f"n{number}" for number in range(1, kind.hosts + 1)}
        with self.job(kind.nodes, kind.hosts, kind.conf) as job:
            view = job.settled(names, (0, 0), kind.first)
            if view is None:
                raise AssertionError(f"the job does not start\n{job.text()}")
            first_step = self.source.randint(60, 90) if scenario.kind == "spare" else self.source.randint(15, 45)
            job.until(lambda: job.step() >= first_step)
            case = choose(scenario, job, view, self.source)
            step, fault_s, logged = job.step(), time.time(), _orders(job)
            scenario.act(case)
            if name == "always":
                yield self._ended(name, case, step)
                return
            left = names - set(case.hosts)
            if name == "two" and view.hosts[0] not in left:
                yield self._waits(name, case, step, left)
                return
            later = job.settled(left, view.epoch, kind.later)
            yield self._judged(name, case, step, self._made(job, fault_s), later, logged)

    def _ended(self, name: str, case: Case, step: int) -> Run:
        """Judge a job that must end on all hosts because restarts do not help."""
        job = case.job
        ended = bool(job.until(lambda: all(agent.poll() is not None for agent in job.running.values()), 3 * LIMIT_S))
        said = "\n".join(path.read_text(errors="replace") for path in job.outputs)
        problems = [] if ended else ["the job does not end"]
        problems += [] if "without progress" in said else ["no agent says why"]
        problems += [] if len(job.worlds()) <= MOST_ROUNDS else [f"{len(job.worlds())} rounds"]
        return self._run(name, case, step, problems, ended, None)

    def _waits(self, name: str, case: Case, step: int, left: set[str]) -> Run:
        """Judge half of the hosts, without the first one: they must wait until a host returns, and then go on."""
        job = case.job
        time.sleep(WATCH_S)
        problems = [] if max(job.worlds()) == case.view.epoch else ["half of the hosts went on, although the others may run"]
        case.job.restore(case.host)
        later = job.settled({*left, case.host}, case.view.epoch)
        goes_on = later is not None and job.go_on(12)
        return self._run(name, case, step, problems + ([] if goes_on else ["the job does not go on"]), goes_on, later)

    def _made(self, job: Cluster, asked_s: float) -> float:
        """Return when a worker has made the fault that it was asked for, or else when it was asked for."""
        return min((each["at"] for each in job.events() if each["what"] == "fault" and each["at"] >= asked_s), default=asked_s)

    def _stays(self, name: str, case: Case, step: int, fault_s: float, logged: int) -> Run:
        """Judge a job that must go on as it is."""
        job = case.job
        time.sleep(WATCH_S)
        goes_on = job.go_on(3)
        found = verdict_s(job, fault_s)
        newest = max(job.worlds())
        problems = [] if goes_on else ["the job does not go on"]
        problems += [f"round {newest} began"] if newest > case.view.epoch else []
        problems += self._wrong_orders(job, SCENARIOS[name], case, logged)
        return self._run(name, case, step, problems, goes_on, None, verdict_s=None if found is None else found - fault_s)

    def _judged(self, name: str, case: Case, step: int, fault_s: float, later: View | None, logged: int) -> Run:
        """Judge a job that must go on in another round."""
        job, scenario = case.job, SCENARIOS.get(name)
        goes_on = later is not None and job.go_on(12)
        problems = [] if goes_on else [f"the job does not go on: rounds {job.worlds()}"]
        problems += self._wrong_orders(job, scenario, case, logged) if scenario is not None else []
        if case.left and scenario is not None:
            alive = job.until(lambda: not [each for each in case.left if each.is_running()], 30.0)
            problems += [] if alive else [f"processes of the killed agent live: {case.left}"]
        if later is None:
            return self._run(name, case, step, problems, goes_on, later)
        order = logged_s(job, "steering: order: ", fault_s) if scenario is not None and scenario.orders else None
        found = verdict_s(job, fault_s) if scenario is not None else None
        if order is not None and order > later.started_s:
            order = None
        if found is not None and found > later.started_s:
            found = None
        return self._run(
            name,
            case,
            step,
            problems,
            goes_on,
            later,
            verdict_s=None if found is None else found - fault_s,
            order_s=None if order is None or found is None else max(0.0, order - found),
            started_s=later.started_s - (fault_s if order is None else order),
            import_s=later.imported_s - later.started_s,
            resumed_s=later.resumed_s - later.imported_s,
            first_s=max(0.0, later.stepped_s - later.checked_s),
            whole_s=later.stepped_s - fault_s - (later.checked_s - later.resumed_s),
            lost_steps=_lost_steps(job, later),
        )

    def _wrong_orders(self, job: Cluster, scenario: Scenario, case: Case, logged: int) -> list[str]:
        wrong = []
        for text in _texts(job)[logged:]:
            if text.startswith(("check", "admit", "not executed")):
                continue  # puts no host out
            parked = re.match(r"park ([^\s:]+)", text)
            right = text.startswith(scenario.orders) if scenario.orders else False
            if not right or (parked is not None and parked[1] not in case.hosts):
                wrong.append(f"order: {text[:160]}")
        return wrong

    def _run(
        self, name: str, case: Case, step: int, problems: list[str], goes_on: bool, view: View | None, **times: Any
    ) -> Run:
        job = case.job
        found: Comparison = compare(lineage(steps_of(job.folder)), self.reference, job.worlds())
        differences = [text for each in job.events() if each["what"] == "checked" for text in each["differences"]]
        problems = problems + overlaps(steps_of(job.folder))
        right = not any(text.startswith(("order", "round")) for text in problems)
        problems = problems + list(found.problems[:3]) + differences[:3]
        if found.loss > 3 * found.noise + 1e-6:
            problems.append(f"loss differs by {found.loss:.2g}, the reference by {found.noise:.2g}")
        return Run(
            name, self.name, self.seed, case.rank, ",".join(case.hosts), step, right and (view is not None or goes_on), goes_on,
            not differences, not found.problems, found.loss, found.noise, **times, problem="; ".join(problems),
        )  # fmt: skip


SAVE_AND_MORE = 12  # steps after which the job has saved again


def _texts(job: Cluster) -> list[str]:
    """Return the orders in the logs, each once, in the order of the files."""
    said = "\n".join(path.read_text(errors="replace") for path in job.outputs)
    return list(dict.fromkeys(re.findall(r"steering: order: (.*)", said)))


def _lost_steps(job: Cluster, later: View) -> int:
    """Return how many steps a round does again."""
    before = [step for epoch, steps in steps_of(job.folder).items() if epoch < later.epoch for step in steps]
    return max(0, max(before, default=0) - later.step)


def _orders(job: Cluster) -> int:
    return len(_texts(job))


def next_row(runs: Sequence[Run], names: Sequence[str], count: int, source: random.Random) -> list[str]:
    """Return the scenarios of the next job: those with the fewest runs first."""
    done = Counter(run.scenario for run in runs)
    left = [name for name in names if done[name] < count]
    source.shuffle(left)
    left.sort(key=lambda name: done[name])
    if left and SCENARIOS[left[0]].kind != "plain":
        return left[:1]
    return [name for name in left if SCENARIOS[name].kind == "plain"][:FAULTS_OF_A_JOB]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--framework", default="deepspeed", help=f"one or more of {', '.join(SETTINGS)}, with commas")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--reference", type=Path, default=Path(tempfile.gettempdir()) / "unickpt-steering-reference")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    until_s = time.monotonic() + 60 * args.minutes
    why = missing() if args.minutes > 0 else ""
    if why:
        print(why, file=sys.stderr)
        return 2
    names, frameworks = args.scenarios.split(","), args.framework.split(",")
    if unknown := {*frameworks} - {*SETTINGS}:
        parser.error(f"--framework: {', '.join(sorted(unknown))} is none of {', '.join(SETTINGS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    sessions: dict[str, Session] = {}
    turns = list(frameworks)
    while turns and time.monotonic() < until_s:
        framework = turns.pop(0)
        possible = [name for name in names if SCENARIOS[name].kind in SETTINGS[framework].kinds]
        mine = [run for run in kept(args.keep) if run.framework in frameworks]
        row = next_row(mine, possible, args.count, random.Random(f"{args.seed} {framework} {len(mine)}"))
        if not row:
            continue
        turns.append(framework)
        session = sessions.setdefault(framework, Session(framework, args.seed, args.reference))
        for run in session.row(row) if SCENARIOS[row[0]].kind == "plain" else session.special(row[0]):
            print(run, flush=True)
            with args.keep.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            if time.monotonic() > until_s:
                break
    runs = kept(args.keep)
    print(table(runs), goals(runs), sep="\n\n")
    if args.page is not None:
        written(args.page, runs)
    return 0 if all(run.good for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
