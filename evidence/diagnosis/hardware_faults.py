"""Faults of hardware in running jobs: what the verdict quotes, and what steering does. ``docs/evidence/hardware.md``.

    python -m evidence.diagnosis.hardware_faults --keep results/hardware.jsonl [--only NAME ...]
        [--page docs/evidence/hardware.md]

Each job has two hosts under ``torchrun --rdzv-backend unickpt``, on one machine. Each host reads its hardware from a recording
(``tests/support/hardware_trees.py``), which changes when rank 1 hangs, becomes slow or is killed. The last job has all that
only looks like a fault at once, and a rank that hangs for a reason of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evidence.document import put, section
from tests.jobs.steering.agents import Agents, host_of
from tests.support.hardware_trees import FAULTS, LOOK_ALIKES, Case, HardwareTree
from unickpt.base.errors import FormatError
from unickpt.diagnosis.hardware.sources import VARIABLE
from unickpt.diagnosis.reports.verdict_line import VerdictLine, parse_line

WORKER = str(Path(__file__).with_name("hardware_worker.py"))
CONF = "hang_seconds=40,still_seconds=3,loop_seconds=60,dead_seconds=20,stopped_seconds=20,slow=evict,slow_seconds=60"
LIMIT_S, QUIET_S = 100.0, 12.0  # for an order; without one
RANK = 1
_ORDER = re.compile(r"order: (park [^\n]*)")
COLUMNS = ("named", "cause", "host", "place", "action")


@dataclass(frozen=True)
class Row:
    """What was right in one job, with the line and the order."""

    case: str
    named: bool
    cause: bool
    host: bool
    place: bool
    action: bool
    line: str
    next: str
    order: str
    seconds: float


class RecordedHosts(Agents):
    """Agents of hosts, each with a recording."""

    def variables(self, name: str) -> dict[str, str]:
        """Return where the recording of a host is."""
        return {VARIABLE: str(self.folder / name / "hardware"), "GLOO_SOCKET_IFNAME": "lo"}


def played(cases: Sequence[Case], kind: str, dead: bool, folder: Path) -> tuple[RecordedHosts, str, float]:
    """Start a job, make the fault in it, and return the job, the host of rank 1, and the time of the fault.

    What makes a rank slow goes on.
    """
    job = RecordedHosts(folder, "1:2", worker=WORKER, conf=CONF)
    try:
        trees = {name: HardwareTree(folder / name / "hardware") for name in ("n0", "n1")}
        for name in trees:
            job.start(name)
        job.until_step(40)
        job.round("", 2)
        started = [each for each in job.starts() if each.rank == RANK][-1]
        pid, host = started.pid, host_of(job, started)
        begin = time.monotonic()
        if dead:
            for case in cases:
                case.change(trees[host], pid)
            time.sleep(1.2)  # a look of the agent
            os.kill(pid, signal.SIGKILL)
        else:
            (folder / "fault").write_text(f"{RANK} {kind}")
            time.sleep(0.2)
            for case in cases:
                case.change(trees[host], pid)
    except BaseException:
        job.close()
        raise
    if kind == "slow":
        threading.Thread(target=_again, args=(cases, trees[host], pid), daemon=True).start()
    return job, host, begin


def _again(cases: Sequence[Case], tree: HardwareTree, pid: int) -> None:
    with contextlib.suppress(OSError):  # the folder of the job is removed at its end
        while (tree.folder / "dev/kmsg").exists():
            time.sleep(3.0)
            for case in cases:
                case.change(tree, pid)


def observed(job: RecordedHosts, begin: float, wanted: str, quiet: bool) -> tuple[list[tuple[VerdictLine, str]], str, float]:
    """Return the lines of verdicts with the sentence on what to do, the first order, and the seconds until it."""
    order, at = "", 0.0
    while time.monotonic() - begin < (QUIET_S if quiet else LIMIT_S):
        text = "\n".join(path.read_text(errors="replace") for path in job.outputs)
        found = _ORDER.search(text)
        if found is not None:
            order, at = found[1], time.monotonic() - begin
            break
        time.sleep(0.2)
    time.sleep(1.0)
    lines = "\n".join(path.read_text(errors="replace") for path in job.outputs).splitlines()
    told = []
    for number, line in enumerate(lines):
        if "unickpt HANG" in line or "unickpt SLOW" in line or "unickpt FAILED" in line:
            with contextlib.suppress(FormatError):
                following = next((each for each in lines[number + 1 : number + 4] if "next: " in each), "")
                told.append((parse_line(line), following.partition("next: ")[2]))
    told.sort(key=lambda each: (each[0].evidence != wanted, not each[0].at))  # the first line may come before the stack
    return told, order, at


def row_of(case: Case, wanted: str, told: list[tuple[VerdictLine, str]], order: str, at: float) -> Row:
    """Judge a job."""
    line, following = told[0] if told else (None, "")
    evidence, host, ranks = (line.evidence, line.host, line.ranks.ranks) if line is not None else ("", "", ())
    place = line is not None and (case.dead or "hardware_worker.py" in line.at)
    if case.broken:
        acted = order.startswith(f"park {wanted}: BROKEN_OUT")
    elif case.dead or case.data:
        acted = not order
    elif case.slow:
        acted = order.startswith(f"park {wanted} for ") and ": SLOW_OUT: " in order
    else:
        acted = order.startswith(f"park {wanted} for ") and ": HUNG_OUT: " in order
    return Row(
        case.name, ranks == (RANK,), evidence == case.quoted and case.hint in following, host == wanted, place,
        acted, str(line) if line is not None else "", following, order.partition(": unickpt")[0], at,
    )  # fmt: skip


def ran(case: Case, also: Sequence[Case] = ()) -> Row:
    """Run one job."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kind = "slow" if case.slow else "data" if case.data else "hang"
        job, host, begin = played([*also, case], kind, case.dead, Path(folder))
        try:
            told, order, at = observed(job, begin, case.quoted, case.dead or (case.data and not case.broken))
        finally:
            job.close()
        return row_of(case, host, told, order, at)


def look_alikes() -> tuple[Case, Sequence[Case]]:
    """Return all look-alikes at once: the case that is quoted, and the others."""
    quoted = next(case for case in LOOK_ALIKES if case.quoted)
    others = [case for case in LOOK_ALIKES if case is not quoted]
    return Case(f"{len(LOOK_ALIKES)} look-alikes at once", quoted.change, quoted.quoted, hint=quoted.hint), others


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [f"| fault | {' | '.join(COLUMNS)} | order | s |", f"|---|{'---|' * (len(COLUMNS) + 2)}"]
    for row in rows:
        marks = " | ".join("yes" if row[column] else "**no**" for column in COLUMNS)
        seconds = f"{row['seconds']:.0f}" if row["seconds"] else "-"
        lines.append(f"| {row['case']} | {marks} | {row['order'] or 'none'} | {seconds} |")
    right = sum(all(row[column] for column in COLUMNS) for row in rows)
    lines += ["", f"All right in {right} of {len(rows)} jobs. Options of steering: `{CONF}`."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; cases that are in it are not repeated")
    parser.add_argument("--only", nargs="*", help="parts of names of cases")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {row["case"] for row in rows}
    together, others = look_alikes()
    for case in (*FAULTS, together):
        if case.name in done or (args.only and not any(part in case.name for part in args.only)):
            continue
        row = asdict(ran(case, others if case is together else ()))
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
        with args.keep.open("a") as file:
            file.write(json.dumps(row) + "\n")
    if args.page:
        command = f"python -m evidence.diagnosis.hardware_faults --keep {args.keep}"
        put(args.page, "hardware faults", section("hardware faults", command, table(rows)))
    print(table(rows))


if __name__ == "__main__":
    main()
