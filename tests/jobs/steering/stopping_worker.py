"""Under torchrun: steps that stop at a common boundary when the job is told to end.

Usage: ``stopping_worker.py FOLDER``. It resumes from the newest checkpoint in ``FOLDER/checkpoints``. Every start adds a line
to ``FOLDER/starts``, and every save at the end one to ``FOLDER/ends``: round, rank, world, step, pid, and at the end the time.
The state of a step follows from the one before, so a step that is done twice, or not at all, shows.
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


def main() -> None:
    folder = Path(sys.argv[1])
    checkpoints = folder / "checkpoints"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state, step = torch.zeros(2, dtype=torch.int64), 0
    if unickpt.latest_checkpoint(checkpoints):
        step = unickpt.load_checkpoint(checkpoints, {"state": state}).step
    preemption = unickpt.Preemption()

    def note(file: str, *more: float) -> None:
        words = (os.environ["UNICKPT_ROUND"], rank, world, step, os.getpid(), *more)
        with (folder / file).open("a") as opened:
            opened.write(" ".join(map(str, words)) + "\n")

    note("starts")
    stop = False
    while not stop:
        seen = torch.tensor([1, int((folder / "stop").exists())])
        dist.all_reduce(seen)
        stop, step = bool(seen[1]), step + 1
        state = torch.tensor([step, int(state[1]) + step * step])
        if rank == 0:
            part = folder / "saved.part"
            part.write_text(str(step))
            part.rename(folder / "saved")
        time.sleep(0.02 * (1 + rank))
        if preemption.due(step):
            unickpt.save_checkpoint({"state": state}, checkpoints / f"step{step}", step=step)
            note("ends", time.time())
            preemption.leave()
    assert int(state[1]) == step * (step + 1) * (2 * step + 1) // 6, (step, state)
    leave()


if __name__ == "__main__":
    main()
