"""The cases of ``cases.py`` with DeepSpeed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import Layout, build, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.policies import cases
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.load.report import LoadReport
from unickpt.testing.launch import leave


class Job:
    refused = MismatchError

    def __init__(self, *, seed: int, frozen: bool = False) -> None:
        torch.manual_seed(seed)
        model = Model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith("blocks.0.mlp")))
        self.engine = build(Layout(0, 1), seed=seed, model=model)
        self.settings = self.engine.optimizer.param_groups[0]

    def train(self) -> None:
        train(self.engine, 1)

    def save(self, folder: Path) -> Path:
        self.engine.save_checkpoint(str(folder))
        return folder / "global_step1"

    def load(self, folder: Path, missing_state: str = "error") -> LoadReport:
        ours = self.engine.checkpoint_engine
        ours.options = dataclasses.replace(ours.options, missing_state=missing_state)
        self.engine.load_checkpoint(str(folder))
        found: LoadReport = ours.last_report
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.engine.module.named_parameters()}

    def moments(self) -> dict[str, torch.Tensor]:
        states = self.engine.optimizer.state
        return {
            name: states[parameter]["exp_avg"].clone()
            for name, parameter in self.engine.module.named_parameters()
            if "exp_avg" in states.get(parameter, ())
        }


def _make(**options: Any) -> cases.Subject:
    return Job(**options)


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    cases.run(_make, Path(sys.argv[1]))
    dist.barrier()
    leave()
