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
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from evidence.diagnosis.fault_rows import Row, Told, orders_in, table, told_in
from evidence.document import put, section
from tests.jobs.steering.agents import Agents, host_of
from tests.support.hardware_trees import FAULTS, LOOK_ALIKES, Case, HardwareTree
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.diagnosis.hardware.sources import VARIABLE

WORKER = str(Path(__file__).with_name("hardware_worker.py"))
CONF = "hang_seconds=40,still_seconds=3,loop_seconds=60,dead_seconds=20,stopped_seconds=20,slow=evict,slow_seconds=60"
LIMIT_S, QUIET_S = 100.0, 12.0  # for an order; without one
RANK = 1
OPTIONS = f"Options of steering: `{CONF}`."
_KINDS = (Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW, Syndrome.FAILED)


class RecordedHosts(Agents):
    """Agents of hosts, each with a recording."""

    def variables(self, name: str) -> dict[str, str]:
        """Return where the recording of a host is. Ranks write the stacks of fatal signals where they do without a variable."""
        return {VARIABLE: str(self.folder / name / "hardware"), "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": ""}


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


def observed(job: RecordedHosts, begin: float, wanted: str, quiet: bool) -> tuple[list[Told], str, float]:
    """Return the verdicts, that with the wanted evidence first, the first order, and the seconds until it."""
    order, at = "", 0.0
    while time.monotonic() - begin < (QUIET_S if quiet else LIMIT_S):
        orders = [each for each in orders_in(text_of(job)) if each.startswith("park ")]
        if orders:
            order, at = orders[0], time.monotonic() - begin
            break
        time.sleep(0.2)
    time.sleep(1.0)
    told = [each for each in told_in(text_of(job)) if each.line.syndrome in _KINDS]
    told.sort(key=lambda each: (each.line.evidence != wanted, not each.line.at))  # the first line may come before the stack
    return told, order, at


def text_of(job: RecordedHosts) -> str:
    """Return the logs of all hosts."""
    return "\n".join(path.read_text(errors="replace") for path in job.outputs)


def row_of(case: Case, wanted: str, told: list[Told], order: str, at: float) -> Row:
    """Judge a job."""
    line, following = (told[0].line, told[0].next) if told else (None, "")
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
        put(args.page, "hardware faults", section("hardware faults", command, f"{table(rows)} {OPTIONS}"))
    print(table(rows))


if __name__ == "__main__":
    main()
