"""ZeRO-Infinity: optimizer states and parameters in files. DeepSpeed compiles async_io, which needs libaio."""

from __future__ import annotations

import copy
import unittest
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.jobs.deepspeed.jobs import build, config, scramble, train
from tests.jobs.deepspeed.model import VOCABULARY
from tests.jobs.deepspeed.resumes import ADAM, assert_trains_on, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences

AIO = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}


class Wide(torch.nn.Module):
    """Two matrices of which half is more than the MiB from which DeepSpeed uses files, one of them frozen; and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 1200)
        self.body = torch.nn.Linear(1200, 1000)
        self.still = torch.nn.Linear(1000, 1100, bias=False)
        self.norm = torch.nn.LayerNorm(1100)
        self.head = torch.nn.Linear(1100, VOCABULARY)
        self.still.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.still(torch.tanh(self.body(self.embed(tokens))))))
        return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def _engine(folder: Path, seed: int, precision: str, *, stage: int = 3, **zero: Any) -> Any:
    """Build an engine. A device ``nvme`` gets a folder of its own. Odd seeds build the model under ``zero.Init``."""
    # with prefetching, DeepSpeed 0.19.8 reads a parameter into two buffers in a model as small as this one, and fails
    settings: dict[str, Any] = {"stage": stage, "sub_group_size": 700_000, "stage3_prefetch_bucket_size": 0}
    for key, offload in zero.items():
        place = {"nvme_path": str(folder / f"swap{seed}")} if offload["device"] == "nvme" else {}
        settings[key] = {**offload, **place}
    more = {"zero_optimization": settings, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "aio": AIO}
    torch.manual_seed(seed)
    cfg = config(here(stage, precision), **more)
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(cfg), enabled=stage == 3 and seed % 2 == 1):
        model = Wide()
    return build(here(stage, precision), seed=seed, model=model, **more)


def _there_and_back(folder: Path, precision: str, **zero: Any) -> None:
    """From files to memory under another ZeRO stage, back into files, and from files to files."""
    if not AsyncIOBuilder().is_compatible():
        raise unittest.SkipTest("DeepSpeed cannot compile async_io: libaio is not installed")
    source = _engine(folder, 1, precision, **zero)
    train(source, 2)
    assert source.save_checkpoint(str(folder / "a")) is True
    assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
    truth = consolidated(source, ADAM)
    losses = train(source, 2)
    target = _engine(folder, 2, precision, stage=2, offload_optimizer={"device": "cpu"})
    scramble(target)
    target.load_checkpoint(str(folder / "a"))
    assert differences(truth, consolidated(target, ADAM), ignore=("groups",)) == []
    assert target.save_checkpoint(str(folder / "b")) is True
    # only the weights: with swapped states, DeepSpeed 0.19.8 itself has other gradients than without
    assert_trains_on(target, losses[:1], folder / "a")
    for seed, place, trained in ((3, "a", 0), (4, "a", 1), (5, "b", 0)):
        again = _engine(folder, seed, precision, **zero)
        train(again, trained)
        again.load_checkpoint(str(folder / place))
        assert differences(truth, consolidated(again, ADAM), ignore=("groups",)) == [], (seed, place)
        assert again.save_checkpoint(str(folder / f"again{seed}")) is True
        assert train(again, 1) == losses[:1], (seed, place)
        again.load_checkpoint(str(folder / place))
        assert_trains_on(again, losses, folder / place)  # DeepSpeedCPUAdam rounds otherwise after a load


def _swapped(folder: Path, kind: str) -> list[str]:
    return [path.name for path in (folder / "swap1").rglob(f"*{kind}*.swp") if path.stat().st_size >= 1 << 20]


@scenario(1, 2, long=True)
def optimizer_states_on_nvme(folder: Path) -> None:
    _there_and_back(folder, "fp32", offload_optimizer={"device": "nvme"})
    assert dist.get_rank() or (_swapped(folder, "exp_avg-") and _swapped(folder, "exp_avg_sq-"))


@scenario(2, long=True)
def optimizer_states_on_nvme_with_a_pipeline(folder: Path) -> None:
    both = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 10}
    _there_and_back(folder, "bf16", offload_optimizer=both)


@scenario(2, long=True)
def parameters_on_nvme(folder: Path) -> None:
    parameters = {"device": "nvme", "buffer_size": 700_000, "buffer_count": 8, "max_in_cpu": 1000}
    _there_and_back(folder, "bf16", offload_optimizer={"device": "cpu"}, offload_param=parameters)
    assert dist.get_rank() or _swapped(folder, "_param.tensor")


@scenario(2, long=True)
def parameters_and_optimizer_states_on_nvme(folder: Path) -> None:
    parameters = {"device": "nvme", "buffer_size": 700_000, "buffer_count": 8, "max_in_cpu": 1000}
    _there_and_back(folder, "bf16", offload_optimizer={"device": "nvme"}, offload_param=parameters)
