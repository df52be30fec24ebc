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
