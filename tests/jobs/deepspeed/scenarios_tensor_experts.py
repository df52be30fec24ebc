"""Experts in tensor-parallel jobs beyond the matrix: each part is stored once, and wrong or missing descriptions are named."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed import expert_jobs
from tests.jobs.deepspeed.expert_names import ExpertLayout
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.tensor_expert_jobs import EXPERTS, INNER, build, train
from tests.jobs.deepspeed.tensor_expert_names import TensorExpertLayout
from tests.jobs.deepspeed.tensor_model import WIDTH
from unickpt.checkpoint.load.checkpoint import Checkpoint

DIVIDED, WHOLE = TensorExpertLayout(2, 0, 2, 2, True, 1), TensorExpertLayout(2, 0, 2, 4, False, 1)
IN_EXPERT = "2.moe.deepspeed_moe.experts.deepspeed_experts"


@scenario(4)
def each_part_of_each_expert_is_stored_once_under_its_global_shape(folder: Path) -> None:
    for layout in (DIVIDED, WHOLE):
        engine = build(layout, seed=1)
        train(engine, 1)
        assert engine.save_checkpoint(str(folder / layout.name)) is True
        saved = Checkpoint.open(folder / layout.name / "global_step1")
        shapes = {(info.name, info.state): info.shape for info in saved.index.tensors}
        for expert in range(EXPERTS):
            assert shapes[f"{IN_EXPERT}.{expert}.up.weight", "exp_avg"] == (INNER, WIDTH)
            assert shapes[f"{IN_EXPERT}.{expert}.down.weight", "master"] == (WIDTH, INNER)
            assert shapes[f"{IN_EXPERT}.{expert}.down.bias", "exp_avg_sq"] == (WIDTH,)
        for position, info in enumerate(saved.index.tensors):
            if info.state != "weight" or info.kind == "buffer":
                assert sum(saved.index.box(row).numel for row in saved.index.rows_of(position)) == math.prod(info.shape), info
        groups = [name for group in saved.manifest.optimizer.groups for name in group.parameters]
        assert len(groups) == len(set(groups))


@scenario(4)
def experts_that_nothing_describes_are_named_and_deepspeed_saves(folder: Path) -> None:
    """DeepSpeed copies an expert by ``deepcopy``, which drops the attributes of Megatron's layers."""
    engine = build(DIVIDED, seed=1)
    train(engine, 1)
    name = f"{IN_EXPERT}.0.up.bias"
    del engine.module.get_parameter(name).tensor_model_parallel
    _assert_deepspeed_saves(engine, folder, f"nor the parameter itself tells how the ranks divide {name}")


@scenario(4)
def whole_experts_that_claim_to_be_divided_are_named_and_deepspeed_saves(folder: Path) -> None:
    engine = build(WHOLE, seed=1)
    train(engine, 1)
    name = f"{IN_EXPERT}.0.up.weight"
    vars(engine.module.get_parameter(name)).update(tensor_model_parallel=True, partition_dim=0)
    _assert_deepspeed_saves(engine, folder, f"{name} has tensor_model_parallel=True, but its layer has no")


@scenario(4)
def experts_that_autotp_divides_are_named_and_deepspeed_saves(folder: Path) -> None:
    """Their losses are not those of the model: the tensor-parallel ranks have different tokens there."""
    layout, first = ExpertLayout(2, 4, 1, tensor=2), []
    for division in (expert_jobs.DIVISION, expert_jobs.OF_EXPERT_LAYERS):
        engine = expert_jobs.build(layout, seed=1, kind=expert_jobs.Expert, division=division)
        first.append(expert_jobs.train(engine, 1)[0])
    assert abs(first[0] - first[1]) > 1e-3, first
    _assert_deepspeed_saves(engine, folder, "AutoTP that divides layers of experts (moes.0.deepspeed_moe.experts.deepspeed_exp")


def _assert_deepspeed_saves(engine: torch.nn.Module, folder: Path, why: str) -> None:
    with Log() as log:
        engine.save_checkpoint(str(folder))
    assert any(why in line and "DeepSpeed's own" in line for line in log.lines) == (dist.get_rank() == 0), log.lines
    assert not list(folder.rglob("manifest.json"))
