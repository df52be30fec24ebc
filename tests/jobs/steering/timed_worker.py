"""Under torchrun: timed steps with an all-reduce and a barrier. The step count is the checkpoint.

Usage: ``timed_worker.py FOLDER``. Every start of a worker adds a line to ``FOLDER/starts``: round, rank, world, step, pid.
A file ``stop`` ends the program with success. A file ``fault`` holds a rank, a kind (``loop``, ``sleep``, or ``once`` for a
mismatched call) and the first step at which that rank makes the fault. ``mismatch`` is made again in every round.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.testing.launch import leave

SAVE = 60  # steps, 3 s: agents see a step within a second


def spin() -> None:
    """Compute for ever."""
    number = 0
    while True:
        number += 1


def make_fault(folder: Path, rank: int, step: int) -> None:
    """Make the fault that the file asks for."""
    try:
        wanted, kind, first = (folder / "fault").read_text().split()
    except FileNotFoundError:
        return
    if int(wanted) != rank or step < int(first):
        return
    if kind != "mismatch":
        (folder / "fault").unlink()
    if kind == "loop":
        spin()
    elif kind == "sleep":
        time.sleep(10_000)
    else:
        dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], torch.zeros(2))


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    session.start(TimingOptions(enabled=True, records=4096), dict)
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ['UNICKPT_ROUND']} {rank} {world} {step} {os.getpid()}\n")
    stop = False
    while not stop:
        make_fault(folder, rank, step)
        seen = torch.tensor([1, int((folder / "stop").exists())])
        dist.all_reduce(seen)
        dist.barrier()
        assert seen[0] == world
        stop, step = bool(seen[1]), step + 1
        session.stepped(step)
        if rank == 0 and step % SAVE == 0:
            part = folder / "saved.part"
            part.write_text(str(step))
            part.rename(saved)
        time.sleep(0.05)
    session.stop()
    leave()


if __name__ == "__main__":
    main()
