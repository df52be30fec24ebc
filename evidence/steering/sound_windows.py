"""Sound windows: how often steering gives an order, and a verdict is false, in jobs in which nothing is wrong.

    python -m evidence.steering.sound_windows [--windows 1000] [--jobs 10] [--hosts 2] [--seed 1] [--minutes 60] [--busy 0]
        --keep results/steering-sound.jsonl [--page docs/evidence/steering.md]

Several jobs run at once, which overloads the machine. In each window of a job something makes the other ranks wait, for up to
twice the deadline (``sound_worker.py``): one rank evaluates, uploads, writes or compiles, all of them write or compile, data
come late, batches are uneven. Any order that the policy gives is wrong. A verdict is false unless the others do wait for the
rank that it names: 5 s after the first sign of a hang, the rank is still in its pause; and a rank that takes longer now and
then has made as many pauses of its own. ``--busy`` adds endless loops beside the jobs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from evidence.diagnosis.fault_rows import Told, told_in
from evidence.steering.sound_worker import PAUSES
from tests.jobs.steering.agents import Agents
from unickpt.diagnosis.detectors.verdicts import Syndrome

CONF = "stopped_seconds=6,hang_seconds=10,still_seconds=3,loop_seconds=14,dead_seconds=6,slow=evict,slow_seconds=20"
WORKER = str(Path(__file__).with_name("sound_worker.py"))
BEGIN, FINISH = "<!-- table: made by python -m evidence.steering.sound_windows -->\n\n", "\n<!-- end of table -->"
HANG_S = 5.0  # deadline of a call in such a job
_ORDER = re.compile(r"order: (park [^\n]*|restart[^\n]*|stop[^\n]*|not executed[^\n]*)")
_QUOTED = re.compile(r"unickpt (?:HANG|NETWORK_HANG|SLOW|SLOW_LINK) .*evidence=([^\n]*)")
_NOW_AND_THEN = re.compile(r"longer than the others .*in (\d+) of \d+ steps")
_SAID = re.compile(r"unickpt (HANG|NETWORK_HANG|SLOW|SLOW_LINK|MISMATCH|DEADLOCK) ")


def windows_of(job: Agents) -> list[tuple[str, float]]:
    """Return kind and seconds of the finished windows."""
    path = job.folder / "windows"
    rows = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    return [(kind, float(seconds)) for kind, _, seconds in rows]


def pauses_of(job: Agents) -> list[tuple[int, float, float]]:
    """Return rank, begin and end of the finished pauses."""
    path = job.folder / "pauses"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(rank), float(begin), float(end)) for rank, begin, end in rows]


def false_verdicts(told: list[Told], pauses: list[tuple[int, float, float]]) -> list[str]:
    """Return verdicts that do not name a rank for which the others do wait. That of an unfinished pause is not judged."""
    last = max((end for _, _, end in pauses), default=0.0)
    found = []
    for each in told:
        if each.line.syndrome is Syndrome.NON_COMMUNICATION_HANG:
            at = datetime.fromisoformat(each.line.since).timestamp() + HANG_S
            away = {rank for rank, begin, end in pauses if begin - 1.0 <= at <= end + 1.0}
            if at > last or away.issuperset(each.line.ranks.ranks):
                continue
        often = _NOW_AND_THEN.search(each.sentence)
        if each.line.syndrome is Syndrome.NON_COMMUNICATION_SLOW and often is not None:
            since = datetime.fromisoformat(each.line.since).timestamp() - 1.0
            own = [rank for rank, begin, _ in pauses if begin >= since and rank in each.line.ranks.ranks]
            if len(own) >= int(often[1]):
                continue
        found.append(f"{each.line} | {each.sentence}")
    return found


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Let other processes compute without end."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def result(job: Agents, hosts: int, seed: int, loops: int) -> dict[str, Any]:
    """Return what a job has done so far."""
    said = "\n".join(path.read_text(errors="replace") for path in job.outputs)
    found = windows_of(job)
    return {
        "seed": seed,
        "hosts": hosts,
        "windows": collections.Counter(kind for kind, _ in found),
        "seconds": [seconds for _, seconds in found],
        "orders": _ORDER.findall(said),
        "verdicts": collections.Counter(_SAID.findall(said)),
        "quoted": collections.Counter(_QUOTED.findall(said)),
        "false": false_verdicts(list(told_in(said)), pauses_of(job)),
        "busy": loops,
        "rounds": len({each.round for each in job.starts()}),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    total: collections.Counter[str] = collections.Counter()
    for row in rows:
        total.update(row["windows"])
    orders = [order for row in rows for order in row["orders"]]
    verdicts: collections.Counter[str] = collections.Counter()
    for row in rows:
        verdicts.update(row["verdicts"])
    seconds = [each for row in rows for each in row["seconds"]]
    lines = ["| in the window | windows |", "|---|---|"]
    lines += [f"| {kind} | {total[kind]} |" for kind in PAUSES]
    lines += [f"| all | {sum(total.values())} |", ""]
    took = f"{statistics.median(seconds):.0f} s (median; {min(seconds):.0f} to {max(seconds):.0f})"
    judged = [row for row in rows if "false" in row]
    wrong = sum(len(row["false"]) for row in judged)
    count = sum(sum(row["windows"].values()) for row in judged)
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(verdicts.items())) or "none"
    lines.append(
        f"{len(rows)} jobs, {os.cpu_count()} cores, a window takes {took}. Orders: **{len(orders)}**. Lines of the diagnosis "
        f"that name a rank or a link, which are no orders: {named}."
    )
    if judged:
        lines[-1] += f" False verdicts: **{wrong}** in {count} windows."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10, help="at once")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside the jobs")
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    jobs: dict[int, Agents] = {}
    with tempfile.TemporaryDirectory() as folder, busy(args.busy):
        try:
            for seed in range(args.seed, args.seed + args.jobs if args.windows else args.seed):
                place = Path(folder) / str(seed)
                place.mkdir()
                (place / "seed").write_text(str(seed))
                jobs[seed] = Agents(place, f"1:{args.hosts}", worker=WORKER, conf=CONF)
                for number in range(args.hosts):
                    jobs[seed].start(f"n{number}")
                time.sleep(3.0)
            end = time.monotonic() + 60 * args.minutes
            while time.monotonic() < end and sum(len(windows_of(job)) for job in jobs.values()) < args.windows:
                time.sleep(1.0)
            rows = [result(job, args.hosts, seed, args.busy) for seed, job in jobs.items()]
            for seed, job in jobs.items():
                for path in job.outputs if rows[seed - args.seed]["orders"] else ():
                    print(path.read_text()[-20000:])
        finally:
            for job in jobs.values():
                job.close()
    with args.keep.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    made = table([json.loads(line) for line in args.keep.read_text().splitlines()])
    print(made)
    if args.page is not None:
        text = args.page.read_text()
        head, rest = text.split(BEGIN, 1)
        args.page.write_text(head + BEGIN + made + "\n" + FINISH + rest.split(FINISH, 1)[1])


if __name__ == "__main__":
    main()
