"""Faults of public reports in running jobs (``reported_job.py``): what must be said of each, and what was said."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from evidence.diagnosis.fault_rows import Row, Told, orders_in, told_in
from evidence.diagnosis.hardware_faults import RecordedHosts, text_of
from tests.support.hardware_trees import HardwareTree
from tests.support.repository import REPO
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.testing.launch import environment

WORKER = Path(__file__).with_name("reported_job.py")
CONF = "hang_seconds=12,still_seconds=3,loop_seconds=20,dead_seconds=20,stopped_seconds=6"
HOSTS, EACH = ("n0", "n1"), 2  # hosts, and ranks of each
LIMIT_S, AFTER_S = 90.0, 3.0  # for a job from its start; that is looked at after what is expected has come
PARK = "unickpt hosts park n1"


@dataclass(frozen=True)
class Reported:
    """A fault, and what must be said of it.

    Attributes:
        name: what a person calls it.
        program: function of ``reported_job.py``.
        syndrome: kind of the verdict; None if nobody may be blamed.
        ranks: ranks at fault, or those that the others wait for.
        cause: regular expression for the line and its sentence.
        next: regular expression for the sentence on what to do.
        at: mark of the line of the program that must be named; '' if no line is at fault.
        order: regular expression for the first order of steering; '' for none.
    """

    name: str
    program: str
    syndrome: Syndrome | None
    ranks: tuple[int, ...]
    cause: str
    next: str
    at: str = ""
    order: str = ""


HANG, SLOW, FAILED = Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW, Syndrome.FAILED
MISMATCH, DEADLOCK = Syndrome.MISMATCH, Syndrome.DEADLOCK
RESTART = "restart: PROGRAM: "
ENDS = f"$|{RESTART}"  # the call ends a process, so that torchrun may restart the round before there is an order
REPORTED = (
    Reported("SIGSTOP", "stopped", HANG, (2,), "state=stopped", "kill -CONT", "backward", "park n1 for .*STOPPED_OUT"),
    Reported("SIGKILL", "killed", HANG, (1,), "SIGKILL", "was killed: look in the log of the kernel"),
    Reported("exception in one rank", "raises", FAILED, (1,), "KeyError: 'labels'", "mend the program", "raises"),
    Reported("a rank is out of memory", "out_of_memory", FAILED, (3,), "can't allocate memory", "ask for less memory",
             "out_of_memory"),
    Reported("one rank ends in order", "ends_early", MISMATCH, (3,), "rank 3 has ended, and ranks? .* waits? for it",
             "look for fewer batches or an early return on rank 3", "backward", RESTART),
    Reported("a lock of the program", "lock", HANG, (2,), "has not entered", "look at what it does at", "lock",
             "park n1 for .*HUNG_OUT"),
    Reported("data loader stuck", "loader_stuck", HANG, (1,), "cause=data", "waits for its data loader", "loader_stuck"),
    Reported("data loader slow", "loader_slow", SLOW, (1,), "cause=data", "waits for its data loader"),
    Reported("rank 0 evaluates alone", "evaluates", None, (0,), "rank 0 on n0 evaluates", "", "evaluates"),
    Reported("slow disk in a save", "slow_save", None, (1,), "rank 1 on n0 saves", "", "slow_save"),
    Reported("barrier on rank 0 alone", "rank0_barrier", MISMATCH, (0,), "barrier",
             r"once more than ranks 1(, 2, 3| to 3), which have ended", "rank0_barrier", RESTART),
    Reported("weights load late", "late_load", None, (2,), "rank 2 has not begun to record: process .* on n1",
             "it may still load data or weights", "late_load"),
    Reported("wrong shape", "wrong_shape", MISMATCH, (2,), "50,000 elements", "make the same calls", "wrong_shape", ENDS),
    Reported("wrong dtype", "wrong_dtype", MISMATCH, (1,), "F64, .* on rank 1 ", "make the same calls", "wrong_dtype", ENDS),
    Reported("wrong group", "wrong_group", DEADLOCK, (1,), "all_reduce", "rank 1 calls all_reduce at", "wrong_group", RESTART),
    Reported("groups in another order", "group_order", DEADLOCK, (2,), "all_reduce", "rank 2 calls all_reduce at",
             "group_order", RESTART),
    Reported("both stages send first", "both_send", DEADLOCK, (0, 2), "send", "both ranks 0 and 2 send first", "both_send",
             RESTART),
    Reported("a micro-batch left out", "skipped_micro", MISMATCH, (1,), "barrier", "one all_reduce fewer", "skipped_micro",
             RESTART),
    Reported("plain DDP: a backward pass left out", "ddp", MISMATCH, (1,), "all_reduce", "rank 1 calls all_reduce", "ddp",
             ENDS),
    Reported("FSDP2: a layer left out", "fsdp2", MISMATCH, (2,), "all_gather|reduce_scatter", "rank 2 calls", "fsdp2", ENDS),
    Reported("ZeRO-3: experts differ", "experts", MISMATCH, (2,), "all_gather", "rank 2 calls", "experts", ENDS),
    Reported("garbage collection in rotation", "garbage", SLOW, (0, 1, 2, 3), "collect garbage at different steps",
             "collect garbage at the same steps on all ranks"),
    Reported("every seventh step slow", "seventh", SLOW, (2,), "every 7 steps", "look for what runs at that interval on n1"),
)  # fmt: skip


def place_of(mark: str) -> str:
    """Return the marked line of the program, as verdicts name it."""
    lines = WORKER.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.endswith(f" at: {mark}"))
    return f"{WORKER.parent.name}/{WORKER.name}:{at}"


def hosts_of(ranks: tuple[int, ...]) -> str:
    """Return the hosts of ranks, as verdicts name them."""
    return ",".join(dict.fromkeys(HOSTS[rank // EACH] for rank in ranks))


def seconds_since(told: Told) -> float:
    """Return the time since the first sign of a fault."""
    return time.time() - datetime.fromisoformat(told.line.since).timestamp() if told.line.since else 0.0


def blamed(fault: Reported, job: RecordedHosts) -> Row:
    """Return what is said of a fault whose rank must be named."""
    end, found, seconds, due = time.monotonic() + LIMIT_S, None, 0.0, False
    while time.monotonic() < end and not due:
        time.sleep(0.3)
        text = text_of(job)
        if found is None:
            found = next((told for told in told_in(text) if told.line.syndrome is fault.syndrome), None)
            seconds = seconds_since(found) if found is not None else 0.0
        elif re.match(fault.order, "") or orders_in(text):
            due = True
    time.sleep(AFTER_S)
    text = text_of(job)
    told, orders = list(told_in(text)), orders_in(text)
    best = next((each for each in told if each.line.syndrome is fault.syndrome and each.line.ranks.ranks == fault.ranks), found)
    if best is None:
        return Row(fault.name, False, False, False, False, False, "", "", "; ".join(orders), 0.0)
    others = [each for each in told if not set(each.line.ranks.ranks) <= set(fault.ranks)]
    acted = bool(re.match(fault.order or "$", orders[0] if orders else ""))
    return Row(
        fault.name, best.line.ranks.ranks == fault.ranks and not others,
        bool(re.search(fault.cause, f"{best.line} {best.sentence}")), best.line.host == hosts_of(fault.ranks),
        place_of(fault.at) in f"{best.line}" if fault.at else None, bool(re.search(fault.next, best.next)) and acted,
        f"{best.line} | {best.sentence}", best.next, "; ".join(each.partition(": unickpt")[0] for each in orders), seconds,
    )  # fmt: skip


def diagnosed(job: RecordedHosts) -> str:
    """Return what a person who asks is told: of the whole job by its agent, and with places by the records of this machine."""
    asked = [[str(each / "agent")] for each in job.rings() if (each / "agent").exists()]
    asked += [[str(each) for each in job.rings() if any(each.glob("*.ring"))]] if asked else []
    command = [sys.executable, "-m", "unickpt.cli.main", "diagnose"]
    return "\n".join(
        subprocess.run([*command, *each], cwd=REPO, env=environment(REPO), capture_output=True, text=True).stdout
        for each in asked
    )


def excused(fault: Reported, job: RecordedHosts) -> Row:
    """Return what is said of a rank for which the others may wait, in the log or to a person who asks."""
    end, said = time.monotonic() + LIMIT_S, ""
    ranks = f"for rank {fault.ranks[0]}"
    while time.monotonic() < end and not re.search(fault.cause, said):
        time.sleep(1.0)
        log = "\n".join(line for line in text_of(job).splitlines() if "unickpt: " in line)
        said = log if re.search(fault.cause, log) else diagnosed(job)
    time.sleep(AFTER_S)
    text = text_of(job)
    told, orders = list(told_in(text)), orders_in(text)
    place = place_of(fault.at) in said
    host = any(name in said for name in (f"on {hosts_of(fault.ranks)}", f"{hosts_of(fault.ranks)} "))
    right = not told and not orders and bool(re.search(fault.next, said))
    lines = [line for line in said.splitlines() if "wait" in line]
    return Row(
        fault.name, ranks in said and not told, bool(re.search(fault.cause, said)), host, place, right,
        " | ".join(lines[-2:]), said[-600:], "; ".join(orders), 0.0,
    )  # fmt: skip


def ran(fault: Reported, keep: Callable[[str], None] = lambda _: None) -> Row:
    """Run one job. ``keep`` gets its log."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        job = RecordedHosts(folder, "1:2", worker=str(WORKER), conf=CONF)
        job.program.append(fault.program)
        try:
            for name in HOSTS:
                HardwareTree(folder / name / "hardware")
                job.start(name, workers=EACH)
            row = blamed(fault, job) if fault.syndrome is not None else excused(fault, job)
            keep(text_of(job))
        finally:
            job.close()
        return row
