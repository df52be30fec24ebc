"""Under torchrun: training under the witness, which acts. A host may be sick.

Usage: ``witness_worker.py FOLDER [LAST] [FRAMEWORK]``, with the last step. A file ``sick`` holds the name of a host, the first
and the last step at which it is sick, and how. ``activation``: its forward passes flip a bit. ``weight``: a bit of a weight
flips after the step. Every start of a worker adds a line to ``FOLDER/starts``: round, rank, world, step, pid. Rank 0 writes the
weights after the last step to ``FOLDER/final.pt``.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

STEPS, EVERY, STEP_S = 24, 2, 0.25
OPTIONS = {"every": EVERY, "checks": ["rest", "replicas", "buddy"], "act": True}
WORKER = Path(__file__)


class Training(Protocol):
    """A model in training.

    Attributes:
        module: the model.
        start: steps done.
    """

    module: Any
    start: int

    def step(self, number: int, rank: int) -> None: ...
    def save(self, number: int) -> None: ...


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


def data(step: int, rank: int) -> torch.Tensor:
    """Return the input of a rank in a step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


class OfTorch:
    """DDP."""

    def __init__(self, folder: Path) -> None:
        from torch.nn.parallel import DistributedDataParallel

        import torch_unickpt
        import unickpt

        torch.distributed.init_process_group("gloo")
        unickpt.time_collectives()
        torch.manual_seed(5)
        self.module, self._folder = Model(), folder / "out"
        self._model = DistributedDataParallel(self.module)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        self.start = torch_unickpt.resume_or_start(self._model, self._optimizer, self._folder).step
        torch_unickpt.witness(self._model, self._optimizer, OPTIONS, step=self.start)

    def step(self, number: int, rank: int) -> None:
        self._model(data(number, rank)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, number: int) -> None:
        import unickpt

        unickpt.save_training(self._model, self._optimizer, self._folder / f"s{number}", step=number)


def training(framework: str, folder: Path) -> Training:
    """Return the model of a framework, as its newest checkpoint has it."""
    if framework == "torch":
        return OfTorch(folder)
    module = importlib.import_module(f"tests.jobs.steering.witness_{framework}")  # each imports its framework first
    found: Training = module.Of(folder)
    return found


def before_forks(arguments: Sequence[str]) -> None:
    """Import the framework."""
    importlib.import_module("torch_unickpt" if arguments[2] == "torch" else f"tests.jobs.steering.witness_{arguments[2]}")


def sickness(folder: Path) -> tuple[range, str]:
    """Return the steps at which this host is sick, and how."""
    from unickpt.base.round_folder import host_name

    if not (folder / "sick").exists():
        return range(0), ""
    host, first, last, kind = (folder / "sick").read_text().split()
    return (range(int(first), int(last) + 1) if host == host_name() else range(0)), kind


def flip(module: torch.nn.Module) -> None:
    """Change a bit of a weight as a fault of the memory does: no counter of writes notices."""
    weight = max(module.parameters(), key=lambda each: each.numel())
    weight.data.view({4: torch.int32, 2: torch.int16}[weight.element_size()]).view(-1)[3] ^= 1 << 6


def main() -> None:
    folder, last = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else STEPS
    made = training(sys.argv[3] if sys.argv[3:] else "torch", folder)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ.get('UNICKPT_ROUND', '-')} {rank} {world} {made.start} {os.getpid()}\n")
    wrong, kind = sickness(folder)
    for number in range(made.start + 1, last + 1):
        made.module.sick = number in wrong and kind == "activation"
        made.step(number, rank)
        made.save(number)
        if number in wrong and kind == "weight":
            flip(made.module)
        time.sleep(STEP_S)
    if rank == 0:
        torch.save(made.module.state_dict(), folder / "final.pt")
    torch.distributed.barrier()

    from unickpt.testing.launch import leave

    leave()


if __name__ == "__main__":
    main()
