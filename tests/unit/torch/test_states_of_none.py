"""States of a user's optimizer that are None: of all parameters, or of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt


class Averaging(torch.optim.Optimizer):
    """SGD with momentum that follows the mean of the gradients of some tensors. The states of the others are None."""

    def __init__(self, params: Any, averaged: tuple[int, ...]) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.averaged = averaged

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
                state["mean"], state["seen"] = (torch.zeros_like(p), 0) if p.dim() in self.averaged else (None, None)
            state["momentum"].mul_(0.9).add_(p.grad)
            if state["seen"] is not None:
                state["seen"] += 1
            if state["mean"] is not None:
                state["mean"].lerp_(p.grad, 0.1)
            p.sub_(1e-2 * (state["momentum"] if state["mean"] is None else state["momentum"] + state["mean"]))


class OnlyNone(torch.optim.SGD):
    """As torch's SGD of before 2.3 without momentum: the only state of a parameter is None."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum_buffer"] = None


def job(seed: int, averaged: tuple[int, ...]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    return model, Averaging(model.parameters(), averaged)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 0.5 + number)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for each in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize("stepped", [0, 1], ids=["new job", "after a step"])
@pytest.mark.parametrize("averaged", [(), (2,), (1, 2)], ids=["all none", "some none", "none is none"])
def test_states_that_are_none_stay_none(tmp_path: Path, averaged: tuple[int, ...], stepped: int) -> None:
    model, optimizer = job(0, averaged)
    train(model, optimizer, 0, 1, 2)
    unickpt.save_training(model, optimizer, tmp_path, step=3)
    expected = states(optimizer)
    assert [each["seen"] for each in expected] == [3 if dim in averaged else None for dim in (2, 1, 2, 1)]
    other, resumed = job(1, averaged)
    train(other, resumed, *range(stepped))
    start = unickpt.load_training(other, resumed, tmp_path)
    assert states(resumed) == expected
    assert {entry.outcome for entry in start.report.entries} == {"restored"}
    assert train(other, resumed, 3, 4) == train(model, optimizer, 3, 4)


def test_none_replaces_the_tensor_of_the_job_that_loads(tmp_path: Path) -> None:
    model, optimizer = job(0, ())
    train(model, optimizer, 0)
    unickpt.save_training(model, optimizer, tmp_path, step=1)
    other, resumed = job(1, (1, 2))
    train(other, resumed, 0)
    unickpt.load_training(other, resumed, tmp_path)
    assert states(resumed) == states(optimizer)


def test_a_parameter_whose_only_state_is_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = OnlyNone(model.parameters(), lr=0.1)
    train(model, optimizer, 0)
    unickpt.save_training(model, optimizer, tmp_path, step=1)
    resumed = OnlyNone(model.parameters(), lr=0.1)
    unickpt.load_training(model, resumed, tmp_path)
    assert states(resumed) == [{"momentum_buffer": None}] * 2
