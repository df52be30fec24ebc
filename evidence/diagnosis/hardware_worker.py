"""Under torchrun: a job that trains without end, one rank of which hangs or becomes slow when a file says so.

Usage: ``hardware_worker.py FOLDER``. Every start of a worker adds a line to ``FOLDER/starts`` (round, rank, world, step, pid).
``FOLDER/fault`` holds ``rank kind``: ``hang``, ``data`` (a wait for data that does not end), ``slow`` or nothing. A file
``stop`` ends the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.diagnosis.recording.records import Phase

STEP_S, SLOWER_S = 0.05, 0.6  # slow enough that one host of two is better than both, on a busy machine, too


def hang() -> None:
    """Wait for a device that does not answer."""
    while True:
        time.sleep(1.0)


def compute(rank: int, folder: Path, step: int) -> None:
    """Work for a step, as the file says."""
    time.sleep(STEP_S)
    try:
        wanted, kind = (folder / "fault").read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if int(wanted) != rank:
        return
    if kind in ("hang", "data"):
        (folder / "fault").unlink()
        (folder / "begun").write_text(str(step))
        with session.in_phase(Phase.DATA) if kind == "data" else contextlib.nullcontext():
            hang()
    time.sleep(SLOWER_S)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    session.start(TimingOptions(enabled=True, records=4096), dict)
    rank, world, step, stop = dist.get_rank(), dist.get_world_size(), 0, False
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ['UNICKPT_ROUND']} {rank} {world} {step} {os.getpid()}\n")
    while not stop:
        compute(rank, folder, step)
        seen = torch.tensor([int((folder / "stop").exists())])
        dist.all_reduce(seen)
        stop, step = bool(seen[0]), step + 1
        session.stepped(step)
        if rank == 0:
            (folder / "saved.part").write_text(str(step))
            (folder / "saved.part").rename(folder / "saved")
    session.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
