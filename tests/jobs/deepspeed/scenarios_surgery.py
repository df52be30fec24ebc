"""Edited checkpoints in real engines: their state is restored, and training continues."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed import model as model_module
from tests.jobs.deepspeed.jobs import Layout, build, scramble, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import assert_trains_on
from tests.jobs.deepspeed.scenario_worker import scenario
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import differences
from unickpt.cli.main import main

TAG = "global_step3"


class _Renamed(Model):
    """The same model with other names of layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers = self._modules.pop("blocks")

    @property
    def blocks(self) -> Any:
        return self.layers


def _trained(folder: Path, stage: int) -> Any:
    engine = build(Layout(stage, dist.get_world_size(), "bf16"), seed=1)
    train(engine, 3)
    assert engine.save_checkpoint(str(folder)) is True
    return engine


def _loaded(folder: Path, stage: int, model: torch.nn.Module, **load: Any) -> Any:
    """Load a checkpoint into another engine, and assert that it saves the same state again."""
    engine = build(Layout(stage, dist.get_world_size(), "bf16"), seed=2, model=model)
    scramble(engine)
    path, _ = engine.load_checkpoint(str(folder), tag=TAG, **load)
    assert path is not None
    assert engine.save_checkpoint(str(folder), tag="again") is True
    if not load:
        apart = list(differences(Checkpoint.open(folder / TAG), Checkpoint.open(folder / "again")))
        assert [each for each in apart if not each.equal] == []
    return engine


@scenario(1)
def a_renamed_checkpoint_continues_like_the_original(folder: Path) -> None:
    source = _trained(folder / "a", 2)
    arguments = ["--rename", "blocks.{i}.*=layers.{i}.*"]
    assert main(["edit", str(folder / "a"), str(folder / "b" / TAG), *arguments]) == 0
    target = _loaded(folder / "b", 1, _Renamed())
    assert_trains_on(target, train(source, 2), folder / "b", tag=TAG)


@scenario(1)
def one_with_more_rows_and_rounded_moments_trains_on(folder: Path) -> None:
    _trained(folder / "a", 2)
    arguments = [
        "--vocabulary", "36", "--vocabulary-tensors", "head.weight", "--cast", "*:exp_avg=bfloat16",
        "--cast", "*:exp_avg=float32", "--rename", "blocks.{i}.*=layers.{i}.*",
    ]  # fmt: skip
    assert main(["edit", str(folder / "a"), str(folder / "b" / TAG), *arguments]) == 0
    before, model_module.VOCABULARY = model_module.VOCABULARY, 36
    try:
        target = _loaded(folder / "b", 2, _Renamed())
        losses = train(target, 3)
    finally:
        model_module.VOCABULARY = before
    assert target.global_steps == 6
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 2 * math.log(36)


@scenario(1)
def an_average_is_loaded_without_an_optimizer(folder: Path) -> None:
    source = _trained(folder / "a", 1)
    train(source, 1)
    assert source.save_checkpoint(str(folder / "a")) is True
    assert main(["average", str(folder / "b" / TAG), str(folder / "a"), "--last", "2"]) == 0
    target = _loaded(folder / "b", 1, Model(), load_optimizer_states=False, load_lr_scheduler_states=False)
    mean, again = (Checkpoint.open(folder / "b" / tag) for tag in (TAG, "again"))
    for info in mean.index.tensors:
        if info.state in ("weight", "master"):
            assert torch.equal(mean.read_tensor(*info.key), again.read_tensor(*info.key)), info.key
    assert all(map(math.isfinite, train(target, 2)))
