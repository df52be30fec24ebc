"""A small model of megatron-core under the witness, for ``witness_worker``. All ranks have copies of its weights."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_unickpt
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.steering.witness_worker import OPTIONS
from unickpt.base.options.job import TimingOptions


class Of:
    """Data parallelism and a plain optimizer in fp32. ``module.sick``: a bit of an activation flips."""

    def __init__(self, folder: Path) -> None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        ranks = dist.get_world_size()
        self._job, self._folder = Job(Layout(dp=ranks, optimizer="fp32"), batch=ranks, layers=1), folder / "out"
        megatron_unickpt.time_collectives(TimingOptions(enabled=True, records=4096))
        self.module = self._job.modules[0]
        self.module.sick = False
        self.module.decoder.layers[0].mlp.linear_fc1.register_forward_hook(self._computed)
        chunks, optimizer = self._job.chunks, self._job.optimizer
        self.start = megatron_unickpt.resume_or_start(self._folder, chunks, optimizer)["iteration"]
        self._job.step = self.start
        megatron_unickpt.witness(chunks, optimizer, OPTIONS, step=self.start)

    def _computed(self, _layer: Any, _args: Any, output: Any) -> None:
        if self.module.sick:
            output[0].data.view(torch.int32).view(-1)[3] ^= 1 << 20

    def step(self, number: int, rank: int) -> None:  # noqa: ARG002 - its batches depend on its own count
        self._job.train(1)

    def save(self, number: int) -> None:
        megatron_unickpt.save(self._folder / f"s{number}", self._job.chunks, self._job.optimizer, iteration=number)
