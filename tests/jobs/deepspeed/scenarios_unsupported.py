"""Layouts that unickpt does not support: DeepSpeed saves them itself, and training continues.

A module of its own: experts leave global process groups behind in DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.scenario_worker import scenario


class Net(torch.nn.Module):
    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.enter = torch.nn.Linear(8, 8)
        self.moe = MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1)
        # as an adapter library does after DeepSpeed has marked the parameters of the experts
        for expert in self.moe.deepspeed_moe.experts.deepspeed_experts:
            expert.adapter = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.moe(self.enter(x))[0] ** 2).mean()


@scenario(2)
def parameters_that_deepspeed_averages_over_different_experts_are_saved_by_it_with_one_warning(folder: Path) -> None:
    cfg = {
        "train_batch_size": 8, "unickpt": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }  # fmt: skip
    net = Net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=cfg)
    with Log() as log:
        for step in range(2):
            engine.backward(engine(torch.ones(4, 8)))
            engine.step()
            assert engine.save_checkpoint(str(folder), tag=f"s{step}") is True
    _check(engine, folder, log, "parameters in experts that DeepSpeed does not treat as such (moe.deepspeed_moe")


def _check(engine: Any, folder: Path, log: Log, what: str) -> None:
    warnings = [line for line in log.lines if what in line]
    assert len(warnings) == (1 if dist.get_rank() == 0 else 0), log.lines
    assert not list(folder.rglob("manifest.json"))
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None


class _Remembering(torch.nn.Linear):
    """Has state that only its own code for a state dict gives."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) / self.passes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}passes"] = self.passes

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.passes = state_dict.pop(f"{prefix}passes", 0)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Around(torch.optim.Optimizer):
    """Steps with another optimizer, which has the states."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


def _stateful(layer: type[torch.nn.Linear], optimizer: type[torch.optim.Optimizer], stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), layer(4, 4))
    config = {
        "train_batch_size": 4, "unickpt": {"enabled": True}, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer(net.parameters(), lr=0.01), config=config)  # type: ignore[call-arg]
    return engine


class _Plain(torch.optim.AdamW):
    """Has a state dict of its own, which is torch's."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def _losses(engine: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = (engine(torch.ones(2, 4)) ** 2).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@scenario(2)
def state_of_a_users_own_code_is_saved_by_deepspeed_with_one_warning(folder: Path) -> None:
    """A resume without it would take other steps without a word."""
    kinds = {
        "optimizer": (torch.nn.Linear, _Around, "_Around has another optimizer inside (AdamW), with states of its own"),
        "module": (_Remembering, torch.optim.AdamW, "modules with state of their own in the state dict (1.passes)"),
    }
    for stage in (0, 2, 3):
        for name, (layer, optimizer, what) in kinds.items():
            engine, place = _stateful(layer, optimizer, stage, 1), folder / f"{name}{stage}"
            with Log() as log:
                _losses(engine, 2)
                assert engine.save_checkpoint(str(place)) is True
                losses = _losses(engine, 2)
                assert engine.save_checkpoint(str(place)) is True
            assert len([line for line in log.lines if what in line]) == (1 if dist.get_rank() == 0 else 0), log.lines
            again = _stateful(layer, optimizer, stage, 2)
            path, _ = again.load_checkpoint(str(place), tag="global_step2")
            assert path is not None
            assert _losses(again, 2) == losses, (name, stage)
        engine = _stateful(torch.nn.Linear, _Plain, stage, 1)
        _losses(engine, 2)
        assert engine.save_checkpoint(str(folder / f"plain{stage}")) is True
        assert list((folder / f"plain{stage}").rglob("manifest.json"))


@scenario(1)
def own_entries_of_frozen_modules_leave_a_job_with_unickpt(folder: Path) -> None:
    """As those of the quantized base model under an adapter, which every start makes again."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(_Remembering(4, 4).requires_grad_(False), torch.nn.Linear(4, 4))
    config = {
        "train_batch_size": 2, "unickpt": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net[1].parameters()), config=config)
    _losses(engine, 1)
    assert engine.save_checkpoint(str(folder)) is True
    assert list(folder.rglob("manifest.json"))
