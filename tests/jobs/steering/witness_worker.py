"""Under torchrun: DDP training under the witness, which acts. A host may be sick: its forward passes flip a bit.

Usage: ``witness_worker.py FOLDER [LAST]``, with the last step. A file ``sick`` holds the name of a host, and the first and the
last step at which it computes wrongly. Every start of a worker adds a line to ``FOLDER/starts``: round, rank, world, step, pid.
Rank 0 writes the weights after the last step to ``FOLDER/final.pt``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_unickpt
import unickpt
from unickpt.base.round_folder import host_name

STEPS, EVERY, STEP_S = 24, 2, 0.25


class Model(torch.nn.Module):
    """Two layers. ``sick``: a bit of the first one's output flips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.sick = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.sick:
            bits = hidden.detach().clone()
            bits.view(torch.int32).view(-1)[3] ^= 1 << 20
            hidden = hidden + (bits - hidden.detach())
        found: torch.Tensor = self.second(torch.tanh(hidden))
        return found


def sickness(folder: Path) -> range:
    """Return the steps at which this host computes wrongly."""
    if not (folder / "sick").exists():
        return range(0)
    host, first, last = (folder / "sick").read_text().split()
    return range(int(first), int(last) + 1) if host == host_name() else range(0)


def main() -> None:
    folder, last = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else STEPS
    dist.init_process_group("gloo")
    unickpt.time_collectives()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    module = Model()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = torch_unickpt.resume_or_start(model, optimizer, folder / "out")
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ.get('UNICKPT_ROUND', '-')} {rank} {world} {start.step} {os.getpid()}\n")
    options = {"every": EVERY, "checks": ["rest", "replicas", "buddy"], "act": True}
    torch_unickpt.witness(model, optimizer, options, step=start.step)
    wrong = sickness(folder)
    for step in range(start.step + 1, last + 1):
        module.sick = step in wrong
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        unickpt.save_training(model, optimizer, folder / "out" / f"s{step}", step=step)
        time.sleep(STEP_S)
    if rank == 0:
        torch.save(module.state_dict(), folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
