"""Under torchrun: steps with an all-reduce. The step count is the checkpoint. A file ``stop`` ends the program with success.

If a folder ``checkpoints`` exists, the program also saves with unickpt every ``SAVE`` steps.

Usage: ``worker.py FOLDER``. Every start of a worker adds a line to ``FOLDER/starts``: round, rank, world, step, pid.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import unickpt
from unickpt.testing.launch import leave

SAVE = 320  # steps
STEP_S = 0.05  # a step takes this long at least


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved, checkpoints = folder / "saved", folder / "checkpoints"
    step = int(saved.read_text()) if saved.exists() else 0
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ['UNICKPT_ROUND']} {rank} {world} {step} {os.getpid()}\n")
    stop = False
    while not stop:
        seen = torch.tensor([1, int((folder / "stop").exists())])
        dist.all_reduce(seen)
        assert seen[0] == world
        stop, step = bool(seen[1]), step + 1
        if rank == 0:
            part = folder / "saved.part"
            part.write_text(str(step))
            part.rename(saved)
        if step % SAVE == 0 and checkpoints.exists():
            assert unickpt.save_checkpoint({"step": torch.tensor(step)}, checkpoints / f"step{step}", step=step).committed
        time.sleep(STEP_S)
    leave()


if __name__ == "__main__":
    main()
