"""A training that is saved and loaded goes on bit for bit as one that was not, whatever the kind of its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import torch_unickpt
import unickpt


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):

        def loss() -> torch.Tensor:
            model.zero_grad()
            found: torch.Tensor = model(torch.randn(3, 4)).abs().pow(2).sum()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step(loss)


def resumed(make: Callable[[], tuple[torch.nn.Module, Any]], folder: Path) -> tuple[Any, Any, torch_unickpt.StartingPoint]:
    """Return a training that went on, and one that was loaded: model and optimizer of both, after the same steps."""
    torch.manual_seed(1)
    first = make()
    train(*first, 3)
    unickpt.save_training(*first, folder / "step3", step=3)
    train(*first, 3)
    second = make()
    start = torch_unickpt.load_training(*second, folder / "step3")
    train(*second, 3)
    return first, second, start


def assert_equal(first: Any, second: Any) -> None:
    torch.testing.assert_close(second[0].state_dict(), first[0].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second[1].state_dict(), first[1].state_dict(), rtol=0, atol=0)


class Kinds(torch.nn.Module):
    """Parameters that are complex, have no element, and are integers that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.table = torch.nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight + self.empty.sum()


@pytest.mark.parametrize("kind", [optim.Adam, optim.ASGD, optim.Rprop, optim.NAdam, optim.SGD])
def test_complex_and_integer_parameters(tmp_path: Path, kind: Any) -> None:
    options = {"momentum": 0.9} if kind is optim.SGD else {}

    def job() -> tuple[torch.nn.Module, Any]:
        model = Kinds()
        return model, kind(model.parameters(), lr=0.01, **options)

    first, second, start = resumed(job, tmp_path)
    assert_equal(first, second)
    assert {entry.outcome for entry in start.report.entries} == {"restored"}
