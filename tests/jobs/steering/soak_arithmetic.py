"""A training whose numbers are equal, bit for bit, on any number of ranks, and its uninterrupted run in one process.

The gradient of each sample is rounded to a grid on which sums of float64 are exact. So the order in which ranks add them does
not matter. Rows are as wide as vectors of the processor, so that it does not matter either how rows are divided among ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unickpt

SAMPLES, BATCH, WIDTH = 1009, 48, 32  # 16, 12, 8, 6 and 4 ranks make the batch
CHECK = 50  # the reference has the state after each of these steps, and after each save
GRID = 2.0**13
_WORD = (1 << 62) - 1


class _Rounded(torch.autograd.Function):
    """A weight whose gradient is on the grid."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.round(gradient * GRID) / GRID


class Model(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5)

        self.inner, self.outer = weight(2 * WIDTH, WIDTH), weight(WIDTH, 2 * WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inner, outer = (_Rounded.apply(each) for each in (self.inner, self.outer))  # type: ignore[no-untyped-call]
        error: torch.Tensor = torch.tanh(values @ inner.T) @ outer.T - values.roll(1, -1)
        return error.square().mean()


class Data(Dataset[tuple[int, torch.Tensor]]):
    """Sample ``i`` is a row of numbers of its own."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scheduler of the learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 64))


def samples(rank: int, ranks: int, start: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Return the samples of a rank, after a number of samples of all ranks."""
    sampler = unickpt.GlobalOrderSampler(SAMPLES, rank=rank, ranks=ranks, per_device=1, start=start, seed=3)
    return ((int(index), values[0]) for index, values in DataLoader(Data(), batch_size=1, sampler=sampler))


def on_grid(loss: float) -> int:
    """Return a loss as a whole number, so that sums are exact."""
    return round(loss * GRID)


def word(index: int) -> int:
    """Return a number for a sample: sums of them tell which samples a step has had."""
    return int.from_bytes(hashlib.blake2b(index.to_bytes(8, "little"), digest_size=7).digest(), "little") & _WORD


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of weights, moments, steps and learning rate. Collective, if they are divided among ranks."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for value in (parameter.detach(), state.get("exp_avg"), state.get("exp_avg_sq")):
            if value is not None:
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.update(whole.clone().numpy().tobytes())
        found.update(str(int(state["step"]) if "step" in state else 0).encode())
    found.update(repr(optimizer.param_groups[0]["lr"]).encode())
    return found.hexdigest()[:24]


@dataclass(frozen=True)
class Done:
    """A step of the uninterrupted run: sum of the losses, sum of the words of its samples, and the state after it."""

    loss: int
    words: int
    state: str


def uninterrupted(steps: int) -> dict[int, Done]:
    """Train in this process, all samples of a step at once, and return each step."""
    torch.set_num_threads(1)
    model, found = Model(), {}
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    order = iter(unickpt.GlobalOrderSampler(SAMPLES, rank=0, ranks=1, per_device=1, seed=3))
    data = torch.stack([Data()[index][1] for index in range(SAMPLES)])
    for step in range(1, steps + 1):
        chosen = list(itertools.islice(order, BATCH))
        losses = gradients(model, data[chosen])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found[step] = Done(sum(map(on_grid, losses)), sum(map(word, chosen)), state_digest(model, optimizer))
    return found


def gradients(model: Model, values: torch.Tensor) -> list[float]:
    """Add the rounded gradient of each sample to those of the model, without autograd. Return the losses."""
    with torch.no_grad():
        hidden = torch.tanh(values @ model.inner.T)
        error = hidden @ model.outer.T - values.roll(1, -1)
        outer = 2 * error / WIDTH
        inner = (outer @ model.outer) * (1 - hidden.square())
        for parameter, after, before in ((model.outer, outer, hidden), (model.inner, inner, values)):
            each = torch.round(after[:, :, None] * before[:, None, :] * GRID) / GRID
            parameter.grad = each.sum(0)
        return [float(each) for each in error.square().mean(1)]


def reference(file: Path, steps: int) -> dict[int, Done]:
    """Return the uninterrupted run of a file, which is made if this machine computes other numbers than it has."""
    first = uninterrupted(20)
    known = _read(file)
    if len(known) < steps or any(known.get(step) != each for step, each in first.items()):
        known = uninterrupted(steps)
        part = file.with_suffix(".part")
        part.write_text("".join(json.dumps([step, each.loss, each.words, each.state]) + "\n" for step, each in known.items()))
        part.rename(file)
    return known


def _read(file: Path) -> dict[int, Done]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {step: Done(*rest) for step, *rest in lines}


def differences(steps: Mapping[int, Done], expected: Mapping[int, Done]) -> list[str]:
    """Return which steps differ, and in what."""
    found = []
    for step, each in steps.items():
        other = expected[step]
        names = [name for name in ("loss", "words", "state") if getattr(each, name) not in ("", getattr(other, name))]
        found += [f"step {step}: {' and '.join('samples' if name == 'words' else name for name in names)}"] if names else []
    return found
