"""The model of ``witness_worker`` in an engine of DeepSpeed."""

from __future__ import annotations

import warnings
from pathlib import Path

import deepspeed
import torch

import ds_unickpt
from tests.jobs.steering.witness_worker import OPTIONS, Model, data

ds_unickpt.install()
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1 << 30,
    "unickpt": {"enabled": True, "timing": {"enabled": True}, "witness": OPTIONS},
}


class Of:
    """ZeRO-1 in fp32."""

    def __init__(self, folder: Path) -> None:
        warnings.filterwarnings("ignore")
        deepspeed.init_distributed("gloo", verbose=False)
        torch.manual_seed(5)
        self.module, self._folder = Model(), str(folder / "out")
        self._engine, *_ = deepspeed.initialize(model=self.module, model_parameters=self.module.parameters(), config=CONFIG)
        self.start = ds_unickpt.resume_or_start(self._engine, self._folder).step

    def step(self, number: int, rank: int) -> None:
        self._engine.backward(self._engine(data(number, rank)).square().mean())
        self._engine.step()

    def save(self, number: int) -> None:
        self._engine.save_checkpoint(self._folder, tag=f"s{number}")
