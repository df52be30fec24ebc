"""Random faults in jobs under ``torchrun --rdzv-backend unickpt``, and what the steering did about them.

    python -m evidence.steering.faults [--runs 10] [--seed 1] [--hosts 3] [--scenarios A,B] [--keep FILE] [--page FILE]

Every run starts one unmodified torchrun agent for each host on this machine, with the small timed script of the tests (gloo).
It makes one fault at a random rank and step, waits for the reaction, and checks which host is out. The times are those of the
log: fault -> first verdict -> order -> the workers of the next round have started.

``--keep`` appends each run to a file. ``--page`` writes a table of all runs of this file to a page of the docs. With
``--runs 0`` nothing else is done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from evidence.steering.readings import logged_s, seconds, verdict_s
from tests.jobs.steering.agents import Agents, Start, host_of
from unickpt.cli.main import main as unickpt

CONF = "stopped_seconds=6,hang_seconds=6,still_seconds=3,loop_seconds=5,out_seconds=600,retries=2,check_share=0.05"
LIMIT_S = 120.0
BEGIN, FINISH = "<!-- table: made by python -m evidence.steering.faults -->\n\n", "\n<!-- end of table -->"


@dataclass(frozen=True)
class Run:
    """Result of one run.

    Attributes:
        right: whether exactly the right host was out, or none where none should be, and the job went on.
        verdict_s: seconds from the fault to the first verdict in the log; None without one.
        order_s: seconds from the first verdict to the order; None without one.
        started_s: seconds from the order, or else from the fault, to the start of all workers of the next round.
        problem: what was wrong.
    """

    right: bool
    verdict_s: float | None = None
    order_s: float | None = None
    started_s: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Scenario:
    """A kind of fault.

    Attributes:
        title: for the table.
        make: makes the fault at a worker.
        out: whether the host of the worker must be out.
        order: how the order must begin; '' for no order.
    """

    title: str
    make: Callable[[Agents, Start], None]
    out: bool
    order: str


def _told(kind: str) -> Callable[[Agents, Start], None]:
    def make(job: Agents, worker: Start) -> None:
        (job.folder / "fault.new").write_text(f"{worker.rank} {kind} 0")
        (job.folder / "fault.new").rename(job.folder / "fault")

    return make


def _signalled(number: signal.Signals) -> Callable[[Agents, Start], None]:
    return lambda _, worker: os.kill(worker.pid, number)


def _asked(job: Agents, worker: Start) -> None:
    given = ["--rdzv-endpoint", f"localhost:{job.port}", "--rdzv-id", job.identifier]
    if unickpt(["hosts", "park", host_of(job, worker), *given]):
        raise RuntimeError("the order was refused")


def _agent(job: Agents, worker: Start) -> None:
    for child in psutil.Process(job.running[host_of(job, worker)].pid).children():
        if "unickpt.steering.host.watcher" in " ".join(child.cmdline()):
            child.kill()


SCENARIOS = {
    "stop": Scenario("SIGSTOP of a rank", _signalled(signal.SIGSTOP), True, "park"),
    "loop": Scenario("endless loop of a rank", _told("loop"), True, "park"),
    "sleep": Scenario("a rank sleeps for ever", _told("sleep"), True, "park"),
    "kill": Scenario("SIGKILL of a rank", _signalled(signal.SIGKILL), False, ""),
    "mismatch": Scenario("a rank calls another collective, once", _told("once"), False, "restart"),
    "park": Scenario("a person parks a host", _asked, True, "park"),
    "agent": Scenario("SIGKILL of a diagnosis agent", _agent, False, ""),
}


def run(scenario: Scenario, source: random.Random, hosts: int, folder: Path) -> Run:
    """Run a job with one fault."""
    job = Agents(folder, f"1:{hosts}", worker="timed_worker.py", conf=CONF)
    names = [f"n{number}" for number in range(1, hosts + 1)]
    try:
        for name in names:
            job.start(name)
        first = job.round("", world=hosts)
        job.until_step(source.randint(20, 80))
        worker = source.choice(first)
        host = host_of(job, worker)
        before = len(job.starts())
        fault_s = time.time()
        scenario.make(job, worker)
        if scenario.make is _agent:
            job.until_step(job.step() + 60)
            return _judged(scenario, job, host, fault_s, None, len(job.starts()) == before)
        size = hosts - 1 if scenario.out else hosts
        started_s = _next_round(job, first[0].round, size, before)
        again = started_s is not None and _goes_on(job)
        return _judged(scenario, job, host, fault_s, started_s, again)
    finally:
        job.close()


def _next_round(job: Agents, after: str, size: int, before: int) -> float | None:
    """Wait until all workers of the next round have started; return when, None if they do not."""
    deadline = time.time() + LIMIT_S
    while time.time() < deadline:
        fresh = [each for each in job.starts()[before:] if each.round > after]
        if fresh and len([each for each in fresh if each.round == fresh[-1].round]) == size == fresh[-1].world:
            return time.time()
        time.sleep(0.05)
    return None


def _goes_on(job: Agents) -> bool:
    step, deadline = job.step(), time.time() + LIMIT_S
    while job.step() < step + 20:
        if time.time() > deadline:
            return False
        time.sleep(0.1)
    return True


def _judged(scenario: Scenario, job: Agents, host: str, fault_s: float, started_s: float | None, goes_on: bool) -> Run:
    said = "\n".join(path.read_text() for path in job.outputs)
    orders = re.findall(r"order: (park ([^\s:]+)|restart|stop|admit|not executed)", said)
    out = {name for _, name in orders if name}
    expected = {host} if scenario.out else set()
    wrong = [text for text, _ in orders if not scenario.order or not text.startswith(scenario.order)]
    order_s = logged_s(job, "steering: order: ", fault_s)
    found_s = verdict_s(job, fault_s)
    problem = "" if out == expected else f"out: {sorted(out)}, expected {sorted(expected)}"
    problem = problem or (f"orders: {wrong}" if wrong else "") or ("" if goes_on else "the job does not go on")
    begin_s = order_s if order_s is not None else fault_s
    return Run(
        not problem,
        None if found_s is None else found_s - fault_s,
        None if order_s is None or found_s is None else max(0.0, order_s - found_s),
        None if started_s is None else started_s - begin_s,
        problem,
    )


def table(results: dict[str, list[Run]]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| fault | runs | right | fault -> verdict | verdict -> order | order -> workers started |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        cells = [seconds([getattr(each, field) for each in runs]) for field in ("verdict_s", "order_s", "started_s")]
        rows.append(f"| {SCENARIOS[name].title} | {len(runs)} | {sum(each.right for each in runs)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def kept(path: Path) -> dict[str, list[Run]]:
    """Return the runs in a file, by scenario."""
    found: dict[str, list[Run]] = {name: [] for name in SCENARIOS}
    for line in path.read_text().splitlines():
        said = json.loads(line)
        found[said["scenario"]].append(Run(**{field.name: said[field.name] for field in fields(Run)}))
    return {name: runs for name, runs in found.items() if runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    results: dict[str, list[Run]] = {name: [] for name in args.scenarios.split(",")}
    source = random.Random(args.seed)
    for number in range(args.runs):
        for name, runs in results.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(SCENARIOS[name], source, args.hosts, Path(folder)))
            print(f"{number + 1} {name}: {runs[-1]}", flush=True)
            if args.keep is not None:
                with args.keep.open("a") as file:
                    file.write(
                        json.dumps({"scenario": name, "hosts": args.hosts, "seed": args.seed, **asdict(runs[-1])}) + "\n"
                    )
    made = table(kept(args.keep) if args.keep is not None else results)
    print(made)
    if args.page is not None:
        text = args.page.read_text()
        head, rest = text.split(BEGIN, 1)
        args.page.write_text(head + BEGIN + made + "\n" + FINISH + rest.split(FINISH, 1)[1])
    return 0 if all(each.right for runs in results.values() for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
