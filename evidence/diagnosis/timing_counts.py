"""What was counted of faults in running jobs: runs, one JSON line each, and the tables that are made of all of them.

    python -m evidence.diagnosis.timing_counts results/diagnosis-runs.jsonl --out docs/evidence/diagnosis.md

Counting takes hours: ``timing_faults.py`` and ``timing_links.py`` add to the lines as they go, whenever a machine has time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import REPO

MARK, END = "<!-- made by evidence/diagnosis/timing_counts.py -->", "<!-- end of evidence/diagnosis/timing_counts.py -->"
QUIET_STEPS = 24  # sound steps between two faults: as many as are looked at


@dataclass
class Run:
    """One fault that was made, and what was said first of it.

    Attributes:
        job: framework, layout, ranks.
        fault: its title.
        rank: that it was made at; -1: it was a link.
        detected, syndrome, named: something was said; of the right kind and cause; of the right rank or link alone.
        seconds: from the fault to that.
        beyond: of a hang, what of them is beyond the deadline that the job had come to.
        steps: of training, from the fault to that.
        said: the words.
        command: that has made it.
        commit: of this project.
    """

    job: str
    fault: str
    rank: int
    detected: bool = False
    syndrome: bool = False
    named: bool = False
    seconds: float = 0.0
    beyond: float = 0.0
    steps: int = 0
    said: str = ""
    command: str = ""
    commit: str = ""


@dataclass
class Sound:
    """A stretch of so many steps without a fault, and what was said in it: a false alarm."""

    job: str
    said: str = ""
    command: str = ""
    commit: str = ""


class Kept:
    """Lines of a file, to which what happens is added at once; without a path it is only told.

    Args:
        path: of the file.
        command: that makes the runs.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self.path, self.command = path, command
        message = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False)
        self.commit = message.stdout.strip()

    def add(self, entry: Run | Sound) -> None:
        entry.command, entry.commit = self.command, self.commit
        line = json.dumps(dataclasses.asdict(entry))
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{line}\n")


def read(path: Path) -> tuple[list[Run], list[Sound]]:
    """All that was kept."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [Run(**each) for each in entries if "fault" in each], [Sound(**each) for each in entries if "fault" not in each]


def page(runs: Sequence[Run], sound: Sequence[Sound], hangs: Iterable[str]) -> str:
    """Tables in Markdown; ``hangs`` are the titles of faults that have a deadline."""
    ending = frozenset(hangs)
    drivers = sorted({each.command.split()[2].rpartition(".")[2] for each in (*runs, *sound)})
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores. Each line of the results file has its options; "
        "the commands are:",
        "",
        *(f"- `python -m evidence.diagnosis.{driver} --keep results/diagnosis-runs.jsonl`" for driver in drivers),
        "",
        "| job | fault | runs | detected | right syndrome | right rank or link | seconds | beyond the deadline | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.job, run.fault].append(run)
    order = list(dict.fromkeys(run.fault for run in sorted(runs, key=lambda run: (run.fault not in ending, run.fault))))
    for (job, fault), each in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        seen = [run for run in each if run.detected]
        hang = fault in ending
        lines.append(
            f"| {job} | {fault} | {len(each)} | {len(seen)} | {sum(r.syndrome for r in each)} | {sum(r.named for r in each)} "
            f"| {spread([r.seconds for r in seen])} | {spread([r.beyond for r in seen]) if hang else ''} "
            f"| {'' if hang else spread([r.steps for r in seen])} |"
        )
    lines += ["", f"| job | periods of {QUIET_STEPS} steps or more without a fault | with a false alarm |", "|---|---|---|"]
    for job in sorted({each.job for each in sound}):
        of_job = [each for each in sound if each.job == job]
        lines.append(f"| {job} | {len(of_job)} | {sum(bool(each.said) for each in of_job)} |")
    wrong = [
        f"| {run.job} | {run.fault} | {_place(run.rank)} | {run.said or 'none'} |"
        for run in runs
        if not (run.syndrome and run.named)
    ]
    wrong += [f"| {each.job} | nothing wrong | - | {each.said} |" for each in sound if each.said]
    if wrong:
        lines += ["", "| job | fault | at rank | wrong or missing verdict |", "|---|---|---|---|", *wrong]
    return "\n".join(lines)


def _place(rank: int) -> str:
    """Return the rank of a fault; '-' for a link."""
    return "-" if rank < 0 else str(rank)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else ""


def put(path: Path, text: str) -> None:
    """Replace what stands between the marks in a document."""
    before, _, rest = path.read_text().partition(MARK)
    path.write_text(f"{before.rstrip()}\n\n{MARK}\n\n{text.rstrip()}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kept", type=Path)
    parser.add_argument("--out", type=Path, help="Markdown file whose part between the marks is replaced")
    args = parser.parse_args()
    from evidence.diagnosis.timing_faults import FAULTS
    from evidence.diagnosis.timing_links import FAULTS as LINKS

    text = page(*read(args.kept), [fault.title for fault in (*FAULTS.values(), *LINKS.values()) if fault.hangs])
    print(text)
    if args.out:
        put(args.out, text)


if __name__ == "__main__":
    main()
