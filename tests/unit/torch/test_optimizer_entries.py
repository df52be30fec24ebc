"""Entries that an optimizer has in its state dict beside states and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_unickpt
import unickpt
from unickpt.base.errors import ConfigError


class Pulled(torch.optim.SGD):
    """SGD that pulls weights to their mean after every third step. Moments are in fp32, the count is of the optimizer."""

    def __init__(self, params: Any, count: int = 0) -> None:
        super().__init__(params, lr=0.1)
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.count += 1
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
            mean.lerp_(p.float(), 0.1)
            if self.count % 3 == 0:
                p.copy_(mean)


class Wrapped(torch.optim.Optimizer):
    """As torch's ``PostLocalSGDOptimizer``: no constructor of torch has run, so no hook is called."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups, self.rounds = inner, inner.param_groups, 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def state_dict(self) -> dict[str, Any]:
        return {**self.optim.state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict.pop("rounds")
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups

    def step(self, closure: Any = None) -> Any:
        self.rounds += 1
        return self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


def job(seed: int, *, wrapped: bool = False) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    return model, Wrapped(torch.optim.AdamW(model.parameters())) if wrapped else Pulled(model.parameters())


def train(model: torch.nn.Module, optimizer: Any, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 0.5 + number, dtype=torch.bfloat16)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_they_are_restored_and_states_keep_their_dtype(asynchronous: bool, tmp_path: Path) -> None:
    model, optimizer = job(0)
    train(model, optimizer, 0, 1)
    pending = unickpt.save_training(model, optimizer, tmp_path, step=2, options=unickpt.SaveOptions(asynchronous=asynchronous))
    if asynchronous:
        pending.wait()
    other, resumed = job(1)
    report = unickpt.load_training(other, resumed, tmp_path).report
    assert resumed.count == 2
    assert [e.outcome for e in report.entries if e.name == "optimizer.count"] == ["restored"]
    assert {state["mean"].dtype for state in resumed.state.values()} == {torch.float32}
    assert train(other, resumed, 2, 3) == train(model, optimizer, 2, 3)


def test_of_an_optimizer_around_another_one(tmp_path: Path) -> None:
    model, optimizer = job(0, wrapped=True)
    train(model, optimizer, 0, 1)
    unickpt.save_training(model, optimizer, tmp_path, step=2, options=unickpt.SaveOptions(asynchronous=True)).wait()
    other, resumed = job(1, wrapped=True)
    unickpt.load_training(other, resumed, tmp_path)
    assert resumed.rounds == 2
    assert train(other, resumed, 2, 3) == train(model, optimizer, 2, 3)
    with pytest.raises(ConfigError, match="Wrapped has no hooks"):
        torch_unickpt.witness(model, optimizer, {"every": 1})


def test_a_checkpoint_without_them_says_so(tmp_path: Path) -> None:
    model = job(0)[0]
    unickpt.save_training(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, step=2)
    other, resumed = job(1)
    resumed.count = 7
    report = unickpt.load_training(other, resumed, tmp_path, missing_state="fresh").report
    assert resumed.count == 7
    assert [(e.outcome, e.reason) for e in report.entries if e.name == "optimizer.count"] == [
        ("left out", "none was saved: it keeps its own value")
    ]
