"""The cases of ``cases.py`` with Megatron."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_unickpt.testing.jobs import Job as Model
from megatron_unickpt.testing.layouts import Layout

import megatron_unickpt  # isort: skip  # after the adaptation of Megatron to a CPU
from megatron.core.dist_checkpointing.core import CheckpointingException  # isort: skip

from megatron_unickpt.edge import RUNTIME
from tests.jobs.policies import cases
from unickpt.checkpoint.load.report import LoadReport
from unickpt.testing.launch import leave


class Job:
    refused = CheckpointingException

    def __init__(self, *, seed: int, frozen: bool = False) -> None:
        self.job = Model(Layout(optimizer="plain"), seed=seed, frozen=(lambda name: "linear_fc2" in name) if frozen else None)
        self.inner = self.job.optimizer.optimizer
        self.settings = self.inner.param_groups[0]

    def train(self) -> None:
        self.job.train(1)

    def save(self, folder: Path) -> Path:
        megatron_unickpt.save(folder, self.job.chunks, self.job.optimizer, iteration=1)
        return folder

    def load(self, folder: Path, **options: Any) -> LoadReport:
        megatron_unickpt.load(folder, self.job.chunks, self.job.optimizer, **options)
        return RUNTIME.last_report

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.job.modules[0].named_parameters()}

    def moments(self) -> dict[str, torch.Tensor]:
        masters = {
            id(getattr(parameter, "main_param", parameter)): name for name, parameter in self.job.modules[0].named_parameters()
        }
        return {
            masters[id(master)]: state["exp_avg"].clone() for master, state in self.inner.state.items() if "exp_avg" in state
        }


def _make(**options: Any) -> cases.Subject:
    return Job(**options)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    cases.run(_make, Path(sys.argv[1]))
    leave()
