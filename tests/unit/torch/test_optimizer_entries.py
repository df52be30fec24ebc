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


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization: an optimizer with a state of its own around one that has the moments."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.Adam(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(self.param_groups[0]["rho"] * p.grad.sign())
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Looking:
    """Looks ahead: slow weights follow the fast ones at every second step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])
        self.slow, self.count = state["slow"], state["count"]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.optimizer.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Container(torch.optim.Optimizer):
    """Steps with several optimizers, as that of torchtitan."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.optimizers = [torch.optim.AdamW([each], lr=0.01) for each in params]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for each in self.optimizers:
            each.step()


def _trained(model: torch.nn.Module, optimizer: Any, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), 0.5 + number)).pow(2).mean()
            loss.backward()
            return loss

        losses.append(closure().item())
        optimizer.step(closure)
    return losses


def _looking(params: Any) -> Looking:
    return Looking(torch.optim.AdamW(params, lr=0.01))


@pytest.mark.parametrize("make", [Sharp, _looking, Container], ids=["sharp", "looking", "container"])
@pytest.mark.parametrize("stepped", [0, 1])
def test_of_an_optimizer_with_another_one_inside(make: Any, stepped: int, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        return model, make(model.parameters())

    model, optimizer = made(0)
    _trained(model, optimizer, 0, 1, 2)
    unickpt.save_training(model, optimizer, tmp_path, step=3)
    other, resumed = made(1)
    _trained(other, resumed, *range(stepped))
    report = unickpt.load_training(other, resumed, tmp_path).report
    assert {e.outcome for e in report.entries} == {"restored"}
    assert _trained(other, resumed, 3, 4, 5) == _trained(model, optimizer, 3, 4, 5)


class Outer(Looking, torch.optim.Optimizer):
    """Looks ahead as an optimizer that shares its groups with the one inside."""

    def __init__(self, params: Any) -> None:
        Looking.__init__(self, torch.optim.AdamW(params, lr=0.01))
        self.param_groups = self.optimizer.param_groups

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Looking.load_state_dict(self, state)
        self.param_groups = self.optimizer.param_groups


def _around(params: Any) -> Any:
    return Wrapped(torch.optim.AdamW(params))


@pytest.mark.parametrize("make", [_around, Outer, Sharp], ids=["around", "outer", "sharp"])
def test_a_schedule_still_moves_the_optimizer_inside(make: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters())
    _trained(model, optimizer, 0)
    unickpt.save_training(model, optimizer, tmp_path, step=1)
    groups = list(optimizer.param_groups)
    report = unickpt.load_training(model, optimizer, tmp_path).report
    inside = next(each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer))
    assert {e.outcome for e in report.entries} == {"restored"}
    assert optimizer.param_groups is inside.param_groups
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))


def test_of_what_an_optimizer_has_beyond_a_limit_a_warning_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = job(0)
    train(model, optimizer, 0)
    optimizer.count = [torch.zeros(300_000)]
    for step in (1, 2):
        unickpt.save_training(model, optimizer, tmp_path / str(step), step=step)
    assert caplog.text.count("Pulled.count: it has large tensors") == 1
    other, resumed = job(1)
    report = unickpt.load_training(other, resumed, tmp_path / "2").report
    assert [e.outcome for e in report.entries if e.name == "optimizer.count"] == ["left out"]


class Warmed:
    """Drives a scheduler after some steps. Both have a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler, self.count = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.scheduler.load_state_dict(state["inner"])


def test_a_scheduler_with_another_one_inside_keeps_its_own_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Warmed(optimizer)
    scheduler.count = 5
    unickpt.save_training(model, optimizer, tmp_path, step=3, scheduler=scheduler)
    resumed = Warmed(optimizer)
    unickpt.load_training(model, optimizer, tmp_path, scheduler=resumed)
    assert resumed.state_dict() == scheduler.state_dict()
