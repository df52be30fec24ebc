"""Sixteen hosts of four ranks: starts, hosts that go dark, return, flap, are divided, and are upgraded one after another.

    python -m evidence.sixty_four.steering [--rounds 5] [--seed 1] [--only rack ...] [--out docs/evidence/sixty-four.md]

Each host is a network namespace with an unmodified torchrun agent. Its ranks are processes without torch that meet in each step
over TCP (``light_worker.py``): what is tested are the agents. One job has all faults in turn, at random hosts. ``--rounds``
jobs run one after the other. ``results/sixty-four-steering.jsonl`` keeps each fault. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence.document import put, section
from evidence.steering.cluster import Cluster
from evidence.steering.readings import seconds
from tests.jobs.steering.namespaces import Network

HEAD, SECTION = "# Sixty-four ranks\n", "steering"
KEPT = Path("results/sixty-four-steering.jsonl")
HOSTS, RANKS, FEWEST = 16, 4, 4  # hosts, ranks of each, and the fewest hosts that may work
CONF = "out_seconds=20,longest_out_seconds=20,retries=50"
LIMIT_S, STILL_S = 180.0, 12.0


@dataclass(frozen=True)
class Result:
    """A fault.

    Attributes:
        what: its name.
        seed: of the job.
        gone_s: from the fault until the others work without the hosts at fault; None if they are not to do that.
        back_s: from the return of the hosts until all work again, or of a start until all do.
        rounds: that it took, with those of the return.
        problem: what was wrong; '' if nothing.
    """

    what: str
    seed: int
    gone_s: float | None
    back_s: float | None
    rounds: int
    problem: str


class Fleet(Cluster):
    """Sixteen hosts of one job."""

    def __init__(self, folder: Path, network: Network) -> None:
        worker = Path(__file__).with_name("light_worker.py")
        super().__init__(folder, network, f"{FEWEST}:{HOSTS}", [str(worker), str(folder)], CONF, workers=RANKS)
        self.names = [f"n{number}" for number in range(1, HOSTS + 1)]

    def round_now(self) -> tuple[str, set[str]] | None:
        """Return the newest round in which a step was done, and its hosts."""
        done = self.done()
        if not done:
            return None
        newest = done[-1][0]
        return newest, {words[5] for words in self._lines("starts") if words[0] == newest}

    def done(self) -> list[tuple[str, int, float]]:
        """Return round, number and time of all steps, in the order in which they were done."""
        return [(words[0], int(words[1]), float(words[2])) for words in self._lines("steps")]

    def _lines(self, name: str) -> list[list[str]]:
        file = self.folder / name
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def leader(self) -> str:
        """Return the host of rank 0 in the newest round."""
        newest = self.done()[-1][0]
        return next(words[5] for words in self._lines("starts") if words[:2] == [newest, "0"])

    def work(self, hosts: set[str], since_s: float, *, fresh: bool = True) -> float | None:
        """Wait until exactly these hosts have done a step after a time. Return the seconds since then; None at the limit.

        ``fresh``: in a round whose first step was done after that time.
        """

        def found() -> float | None:
            now = self.round_now()
            if now is None or now[1] != hosts:
                return None
            done = [at for epoch, _, at in self.done() if epoch == now[0]]
            at = done[0] if fresh else done[-1]
            return at if at > since_s else None

        at: float | None = self.until(found, LIMIT_S)
        return None if at is None else at - since_s

    def twice(self) -> str:
        """Return which rounds worked at the same time; '' if none did."""
        spans: dict[str, list[float]] = {}
        for epoch, _, at in self.done():
            spans.setdefault(epoch, []).append(at)
        order = sorted(spans, key=lambda each: tuple(map(int, each.split("."))))
        both = (f"{one} and {other}" for one, other in itertools.pairwise(order) if max(spans[one]) > min(spans[other]))
        return ", ".join(both)

    def lost_steps(self) -> str:
        """Return a step that does not follow the one before it; '' if all do."""
        numbers = [step for _, step, _ in self.done()]
        return next((f"step {b} after {a}" for a, b in itertools.pairwise(numbers) if b not in (a, a + 1)), "")


Fault = Callable[[Fleet, random.Random], tuple[float | None, float | None]]


def _cold(job: Fleet, _: random.Random) -> tuple[float | None, float | None]:
    begin = time.time()
    for name in job.names:
        job.run(name)
    return None, job.work(set(job.names), begin)


def _gone_and_back(job: Fleet, hosts: Sequence[str], *, wait: bool) -> tuple[float | None, float | None]:
    """Let hosts lose their power, and start them again. ``wait``: the others are too few, and wait for them."""
    begin, rest = time.time(), set(job.names) - set(hosts)
    for name in hosts:
        job.network.down(name)
    for name in hosts:
        job.lose(name)
    gone = None
    if wait:
        time.sleep(STILL_S)
        if any(at > begin + 2 for _, _, at in job.done()):
            raise AssertionError(f"{len(rest)} of {HOSTS} hosts go on alone")
    else:
        gone = job.work(rest, begin)
        if gone is None:
            raise AssertionError(f"the others do not go on: {job.round_now()}")
    begin = time.time()
    for name in hosts:
        job.restore(name)
    return gone, job.work(set(job.names), begin)


def _dark(job: Fleet, source: random.Random) -> tuple[float | None, float | None]:
    return _gone_and_back(job, [source.choice(sorted(set(job.names) - {job.leader()}))], wait=False)


def _rack(job: Fleet, source: random.Random) -> tuple[float | None, float | None]:
    others = source.sample(sorted(set(job.names) - {job.leader()}), 3)
    return _gone_and_back(job, [job.leader(), *others], wait=False)


def _most(job: Fleet, source: random.Random) -> tuple[float | None, float | None]:
    return _gone_and_back(job, source.sample(job.names, 12), wait=True)


def _flap(job: Fleet, source: random.Random) -> tuple[float | None, float | None]:
    host = source.choice(sorted(set(job.names) - {job.leader()}))
    for _ in range(3):
        job.network.down(host)
        time.sleep(9.0)
        job.network.up(host)
        time.sleep(4.0)
    return None, job.work(set(job.names), time.time(), fresh=False)


def _divided(job: Fleet, source: random.Random) -> tuple[float | None, float | None]:
    """Eight hosts cannot reach the other eight, for a while."""
    apart = source.sample(job.names, HOSTS // 2)
    job.network.divide(apart)
    time.sleep(25.0)
    job.network.unite(apart)
    return None, job.work(set(job.names), time.time(), fresh=False)


def _upgrade(job: Fleet, _: random.Random) -> tuple[float | None, float | None]:
    """Each agent is asked to end, and started again."""
    gone, back = [], []
    for name in job.names:
        begin = time.time()
        agent = job.running.pop(name)
        agent.send_signal(signal.SIGTERM)
        gone.append(job.work(set(job.names) - {name}, begin))
        agent.wait(timeout=LIMIT_S)
        begin = time.time()
        job.run(name)
        back.append(job.work(set(job.names), begin))
        if gone[-1] is None or back[-1] is None:
            raise AssertionError(f"upgrade of {name}: {job.round_now()}")
    return statistics.median(each for each in gone if each), statistics.median(each for each in back if each)


FAULTS: dict[str, tuple[str, Fault]] = {
    "cold": ("16 hosts start at once", _cold),
    "upgrade": ("each host is told to end and starts again, one after another", _upgrade),
    "dark": ("a host loses its power", _dark),
    "rack": ("four hosts lose their power at once, rank 0's among them", _rack),
    "most": ("12 of 16 lose their power, and return together", _most),
    "flap": ("the link of a host fails three times", _flap),
    "divided": ("8 hosts cannot reach the other 8, for 25 s", _divided),
}


def faults(seed: int, wanted: Sequence[str], folder: Path) -> list[Result]:
    """Run a job with faults."""
    source, results = random.Random(seed), []
    network = Network([f"n{number}" for number in range(1, HOSTS + 1)])
    job = Fleet(folder, network)
    try:
        for what in ("cold", *(each for each in wanted if each != "cold")):
            before, problem, gone, back = len({epoch for epoch, *_ in job.done()}), "", None, None
            try:
                gone, back = FAULTS[what][1](job, source)
                problem = "" if back is not None else f"not all work again: {job.round_now()}"
            except AssertionError as err:
                problem = str(err)
            problem = problem or job.twice() or job.lost_steps()
            rounds = len({epoch for epoch, *_ in job.done()}) - before
            results.append(Result(what, seed, gone, back, rounds, problem))
            print(results[-1], flush=True)
            with KEPT.open("a") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
            if problem:
                print(job.text()[-20_000:], flush=True)
                break
    finally:
        job.close()
        network.close()
    return results


def table(every: Sequence[Result]) -> str:
    """Return the Markdown table."""
    lines = ["| fault | times | right | until the others work | until all work again | rounds |", "|---|---|---|---|---|---|"]
    for name, (title, _) in FAULTS.items():
        found = [each for each in every if each.what == name]
        if found:
            cells = [seconds([getattr(each, time_) for each in found]) for time_ in ("gone_s", "back_s")]
            rounds = sorted(each.rounds for each in found)
            spread = f"{rounds[0]}" if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"
            right = sum(not each.problem for each in found)
            lines.append(f"| {title} | {len(found)} | {right} | {' | '.join(cells)} | {spread} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            faults(args.seed + number, args.only, Path(folder))
    every = [Result(**json.loads(line)) for line in KEPT.read_text().splitlines()]
    print(table(every))
    if args.out:
        put(args.out, SECTION, section(SECTION, "python -m evidence.sixty_four.steering", table(every)), HEAD)


if __name__ == "__main__":
    main()
