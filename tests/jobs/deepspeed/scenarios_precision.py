"""Layers that compute in bf16 on one rank by a plan: what they compute, and checkpoints of such a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import build, config, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Block, Model
from tests.jobs.deepspeed.resumes import ADAM, assert_trains_on, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.support.extent import some
from unickpt.base.errors import ConfigError
from unickpt.training.precision.policy import Policy

LOW = {"blocks.0": "bf16", "blocks.2": "bf16"}


def _plan(folder: Path, **more: Any) -> str:
    policy = Policy(**{"dtypes": LOW, "ranks": (1,), "world": dist.get_world_size(), **more})
    path = folder / f"plan{dist.get_rank()}.json"
    path.write_text(json.dumps(policy.as_json()))
    return str(path)


def _engine(stage: int, seed: int, plan: str = "", model: Model | None = None, precision: str = "fp32") -> Any:
    section = {**config(here(stage))["unickpt"], **({"precision": plan} if plan else {})}
    torch.manual_seed(seed)
    return build(here(stage, precision), seed=seed, model=model or Model(blocks=3), unickpt=section)


class _UnderAutocast(Block):
    """A block as a user would write it without a plan."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def _by_hand(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(blocks=3)
    if dist.get_rank() == 1:
        for at in (0, 2):
            model.blocks[at].__class__ = _UnderAutocast
    return model


@scenario(2)
def layers_compute_in_the_dtype_of_a_plan_and_checkpoints_are_as_without(folder: Path) -> None:
    for stage in some((1, 3, 0, 2), 2):
        place = folder / str(stage)
        place.mkdir(exist_ok=True)
        plan = _plan(place)
        source = _engine(stage, 1, plan)
        first = train(source, 2)
        assert first == train(_engine(stage, 1, model=_by_hand(1)), 2), stage  # bit for bit
        assert first != train(_engine(stage, 1), 2), stage
        assert source.save_checkpoint(str(place / "ck")) is True
        assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
        truth = consolidated(source, ADAM)
        expected = train(source, 2)
        again = _engine(stage, 2, plan)
        scramble(again)
        again.load_checkpoint(str(place / "ck"))
        assert differences(truth, consolidated(again, ADAM)) == [], stage
        assert_trains_on(again, expected, place / "ck")
        without = _engine((stage + 2) % 4, 3)  # another stage, and no plan
        scramble(without)
        without.load_checkpoint(str(place / "ck"))
        assert differences(truth, consolidated(without, ADAM)) == [], stage


@scenario(2)
def ranks_of_a_plan_of_another_size_and_narrow_weights_are_a_warning(folder: Path) -> None:
    other = _plan(folder, ranks=(3,), world=4)
    with Log() as log:
        engine = _engine(1, 1, other)
    assert any("is not used: it names ranks of a job of 4, and this job has 2 ranks" in line for line in log.lines), log.lines
    assert train(engine, 1) == train(_engine(1, 1), 1)
    with Log() as log:
        engine = _engine(1, 1, _plan(folder), precision="bf16")
    assert any("a plan needs float32 weights" in line for line in log.lines) == (dist.get_rank() == 1), log.lines
    assert train(engine, 1) == train(_engine(1, 1, precision="bf16"), 1)


@scenario(2)
def a_plan_that_cannot_be_read_ends_the_start_of_the_job(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read as JSON"):
        _engine(1, 1, str(folder / "none.json"))
    (folder / "other.json").write_text('{"schema": 1, "dtypes": {"blocks.0": "fp8"}}')
    with pytest.raises(ConfigError, match="must be one of bf16, fp32, not 'fp8'"):
        _engine(1, 1, str(folder / "other.json"))
