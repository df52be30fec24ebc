"""Faults in a running job: the rank at fault, and the verdict on it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.ranks import Ranks
from benchmarks.gpu_checks.rows import NotHereError, Row, Rows
from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.diagnosis.recording.records import Flag, Op
from unickpt.diagnosis.recording.ring_folder import read_folder

AT_STEP, STEP_S, LATE_S = 12, 0.02, 0.06
BEGUN = "begun"  # file that the rank at fault makes


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, and the syndromes that may be said of it."""

    name: str
    syndromes: tuple[str, ...]


FAULTS = {
    "mismatched shapes": Fault("reshape", ("mismatched collectives",)),
    "skipped collective": Fault("skip", ("deadlock between groups", "mismatched collectives", "non-communication hang")),
    "SIGSTOP": Fault("stop", ("non-communication hang",)),
    "SIGKILL": Fault("kill", ("non-communication hang",)),
    "straggler": Fault("late", ("non-communication slow",)),
}
ROWS = tuple(FAULTS)


def check(place: Place, path: Path, limit_s: float) -> None:
    """Make the faults one after the other, each in a job of its own. Called in the parent of the ranks."""
    rows = Rows(path, "faults", place.name if place.dry else f"{place.backend}, {place.ranks} ranks")
    for name, fault in FAULTS.items():
        with rows.row(name, f"rank {place.ranks - 1} is named") as row:
            if place.ranks < 3:
                raise NotHereError("needs three ranks that communicate: with two ranks it is unknown which one differs")
            make(place, fault, row, limit_s / len(FAULTS), train)


def make(place: Place, fault: Fault, row: Row, limit_s: float, action: Callable[[Place, str, int, str], None]) -> None:
    """Make a fault on the last rank of a job whose ranks run an action, and require the verdict on it."""
    culprit = place.ranks - 1
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings:
        ranks = Ranks(place, place.ranks, action, (place, fault.name, culprit, rings))
        try:
            found, seconds = _first_verdict(Path(rings), time.monotonic() + limit_s)
            calls = [ring.records[ring.records["op"] <= Op.RECEIVE] for ring in read_folder(Path(rings)).ranks.values()]
            row.values |= {
                "calls": sum(map(len, calls)),
                "timed on the device": sum(int(((each["flags"] & int(Flag.DEVICE_TIMES)) > 0).sum()) for each in calls),
            }
            if found is None:
                row.require(False, f"no verdict within {limit_s:.0f} s: {ranks.tail()}")
                return
            row.values |= {"s": seconds, "verdict": found["syndrome"], "ranks": ",".join(map(str, found["ranks"]))}
            row.require(found["syndrome"] in fault.syndromes, f"{found['syndrome']} instead of {fault.syndromes[0]}")
            row.require(found["ranks"] == [culprit], f"ranks {found['ranks']} are named")
        finally:
            ranks.end()


def _first_verdict(rings: Path, end: float) -> tuple[dict[str, Any] | None, float]:
    """Return the first verdict of the job's agent, and the seconds since the rank at fault began with it."""
    while time.monotonic() < end:
        time.sleep(0.05)
        verdicts = rings / "verdicts.jsonl"
        lines = verdicts.read_text().splitlines() if verdicts.is_file() else []
        if lines and lines[0].endswith("}"):
            found: dict[str, Any] = json.loads(lines[0])
            return found, time.time() - (rings / BEGUN).stat().st_mtime
    return None, 0.0


def train(place: Place, fault: str, culprit: int, rings: str) -> None:
    """A rank of the job: it computes, reduces, and ends its step, for ever; one rank has a fault.

    Gloo raises an error where NCCL hangs. The rank then stays, as under a launcher that has not ended it yet.
    """
    try:
        _train(place, fault, culprit, rings)
    except RuntimeError:
        traceback.print_exc()
        sys.stderr.flush()
        signal.pause()


def _train(place: Place, fault: str, culprit: int, rings: str) -> None:
    dist.init_process_group(place.backend)
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)  # the first rank alone starts the agent, also where all share a device
    started = session.start(
        TimingOptions(enabled=True, folder=rings), lambda: {"data parallel": [dist.group.WORLD]}, place.events()
    )
    assert started is not None
    gradient, weight = torch.ones(1 << 12, device=place.device), torch.ones(64, 64, device=place.device)
    other = dist.new_group(list(range(dist.get_world_size())))
    step = 0
    while True:
        mine = rank == culprit and step >= AT_STEP
        if mine and step == AT_STEP:
            Path(rings, BEGUN).touch()
        if mine and fault in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        time.sleep(LATE_S if mine and fault == "late" else STEP_S)
        weight = (weight @ weight) / 64
        if step == AT_STEP and fault in ("skip", "reshape") and not (mine and fault == "skip"):
            dist.all_reduce(torch.ones(5 if mine else 7, device=place.device), group=other)
        dist.all_reduce(gradient)
        _read_a_value(gradient)
        gradient.fill_(1.0)
        step += 1
        session.stepped(step)


def _read_a_value(tensor: torch.Tensor) -> Any:
    """As every training loop does at some place: the host waits for the device."""
    return float(tensor[0])
