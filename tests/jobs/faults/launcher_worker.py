"""A rank under torchrun: resumes, compares every bit, then saves at every step and writes down each commit of its start.

Usage: ``python -m tests.jobs.faults.launcher_worker FOLDER STEPS_S``. Lines of ``FOLDER/log`` are JSON objects of rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unickpt
from unickpt.base import launcher_watch

STAYS = "FAULT_STAYS"  # in the environment: the rank does not end with its launcher, as on a host that nobody reaches
VALUES = 1 << 16


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step."""
    return {"values": torch.arange(VALUES, dtype=torch.int64) * 1_000_003 + step, "step": torch.tensor(step)}


def main() -> None:
    folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
    if STAYS in os.environ:
        launcher_watch._watching = os.getpid()
    dist.init_process_group("gloo")
    rank, saves = dist.get_rank(), folder / "saves"
    mine = f"{os.environ.get('UNICKPT_ROUND', '')}:{os.getpid()}"

    def note(**what: Any) -> None:
        if rank == 0:
            with (folder / "log").open("a") as file:
                file.write(json.dumps({"copy": mine, "at_ns": time.time_ns(), **what}) + "\n")

    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    note(what="begins")
    step, wrong = 0, False
    if (saves / "latest").exists():
        found = {name: torch.zeros_like(value) for name, value in state_of(0).items()}
        loaded = unickpt.load_checkpoint(saves, found)
        step = loaded.checkpoint.manifest.step
        wrong = not all(torch.equal(found[name], value) for name, value in state_of(step).items())
    note(what="resumed", step=step, wrong=wrong)
    while not (folder / "stop").exists():
        step += 1
        time.sleep(step_s)
        try:
            unickpt.save_checkpoint(state_of(step), saves / f"step{step}", step=step)
        except unickpt.SaveFailedError as err:
            note(what="refused", step=step, why=str(err))
            os._exit(3)
        if rank == 0:
            at_ns = (saves / f"step{step}" / "manifest.json").stat().st_mtime_ns
            note(what="committed", step=step, made_ns=at_ns)


if __name__ == "__main__":
    main()
