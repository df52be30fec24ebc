"""Megatron-style tensor parallelism beyond the matrix: layouts that are not told or that differ, fp16, vocabularies."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tests.jobs.deepspeed.averaged_jobs import norms_to_average
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.megatron_jobs import INFO, build, common, let_ranks_differ, scramble, train, truth_of
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import Truth, differences
from unickpt.base.errors import MismatchError, UnsupportedLayoutError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

TWO = MegatronLayout(2, 0, 1, 1)
ROWS = "3.down.weight"


def _saved(folder: Path, layout: MegatronLayout, **job: Any) -> Truth:
    """Train and save a layout. Returns its state."""
    engine = build(layout, seed=1, **job)
    train(engine, 2)
    assert engine.save_checkpoint(str(folder)) is True
    assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return truth_of(engine)


def _assert_resumes(folder: Path, layout: MegatronLayout, truth: Truth, tag: str | None = None, **job: Any) -> None:
    engine = build(layout, seed=3, **job)
    scramble(engine)
    engine.load_checkpoint(str(folder), tag=tag)
    assert differences(*common(truth, truth_of(engine))) == []


@scenario(4)
def every_part_of_a_pipeline_is_stored_once_under_its_global_shape(folder: Path) -> None:
    """The norms are parameters to average, of which each tensor-parallel rank stores its own values."""
    with norms_to_average():
        _assert_stores_each_part_once(folder)


def _assert_stores_each_part_once(folder: Path) -> None:
    engine = let_ranks_differ(build(MegatronLayout(2, 2, 1, 1), seed=1))
    train(engine, 2)
    assert engine.save_checkpoint(str(folder)) is True
    truth = truth_of(engine)
    apart = [key for key in truth if key.endswith("@tp1")]
    assert len(apart) == 24
    assert not any(torch.equal(truth[key], truth[key.removesuffix("@tp1")]) for key in apart if key.startswith("exp_avg"))
    saved = Checkpoint.open(folder / "global_step2")
    assert saved.manifest.notes == ()
    topology = saved.manifest.writer.topology
    assert topology | {"tensor": 2, "pipeline": 2, "data": 1, "world_size": 4} == topology
    for position, info in enumerate(saved.index.tensors):
        if info.kind != "object" and info.derived_from is None:
            assert sum(saved.index.box(row).numel for row in saved.index.rows_of(position)) == math.prod(info.shape), info
            assert torch.equal(saved.read_tensor(info.name, info.state), truth.get(f"{info.state}/{info.name}", truth.get(
                f"buffer/{info.name}"))), info  # fmt: skip
    if dist.get_rank() == 0:
        assert main(["verify", str(folder / "global_step2")]) == 0
    engine.load_checkpoint(str(folder))
    assert differences(*common(truth, truth_of(engine))) == [], "each rank has its own values again"
    _assert_resumes(folder, MegatronLayout(1, 2, 2, 1), truth)


@scenario(4)
def pipelines_with_tensor_parallelism_in_fp16_resume(folder: Path) -> None:
    """DeepSpeed refuses fp16 on its CPU accelerator, but torch supports it, so the check is disabled."""
    get_accelerator().is_fp16_supported = lambda: True
    fp16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    layouts = [MegatronLayout(2, 2, 1, 1, "fp16"), MegatronLayout(4, 0, 1, 0, "fp16")]
    for source, target in zip(layouts, reversed(layouts), strict=True):
        truth = _saved(folder / source.name, source, **fp16)
        _assert_resumes(folder / source.name, target, truth, **fp16)


@scenario(2)
def a_parameter_without_a_known_layout_is_named_and_deepspeed_saves(folder: Path) -> None:
    truth = _saved(folder / "whole", TWO)
    engine = build(TWO, seed=3)
    del engine.module.get_parameter(ROWS).tensor_model_parallel
    with Log() as log:
        engine.save_checkpoint(str(folder / "broken"))
    named = f"nor the parameter itself tells how the ranks divide {ROWS}"
    assert any(named in line and "DeepSpeed's own" in line for line in log.lines) == (dist.get_rank() == 0), log.lines
    assert not list((folder / "broken").rglob("manifest.json"))
    with pytest.raises(UnsupportedLayoutError, match=named):
        engine.load_checkpoint(str(folder / "whole"))
    _assert_resumes(folder / "whole", MegatronLayout(1, 0, 2, 2), truth)


@scenario(2)
def ranks_that_disagree_about_a_layout_get_an_error_and_keep_the_last_checkpoint(folder: Path) -> None:
    truth = _saved(folder, TWO)
    engine = build(TWO, seed=3)
    parameter = engine.module.get_parameter(ROWS)
    if dist.get_rank() == 1:
        parameter.partition_dim = 0
    begin = time.monotonic()
    with pytest.raises(MismatchError, match=rf"{ROWS}: \(24, 12\) in the checkpoint, \(48, 6\) in this job"):
        engine.load_checkpoint(str(folder))
    parameter.partition_dim = 1
    engine.load_checkpoint(str(folder))
    train(engine, 1)
    if dist.get_rank() == 1:
        parameter.partition_dim = 0
    with Log() as log:
        engine.save_checkpoint(str(folder))
    assert time.monotonic() - begin < 20
    assert any(ROWS in line for line in log.lines) or dist.get_rank(), log.lines
    assert not list(folder.glob("global_step3/manifest.json")), "DeepSpeed saves by itself"
    _assert_resumes(folder, MegatronLayout(1, 0, 2, 1), truth, tag="global_step2")


@scenario(2)
def entries_of_a_vocabulary_are_never_lost(folder: Path) -> None:
    _saved(folder, MegatronLayout(1, 0, 2, 1))
    entries = INFO["original_vocab_size"]
    target = build(TWO, seed=3)
    try:
        INFO["original_vocab_size"] = entries + 4
        with pytest.raises(MismatchError, match=r"tied_modules.embed.words: 33 rows in the checkpoint, 35 entries in this job"):
            target.load_checkpoint(str(folder))
    finally:
        INFO["original_vocab_size"] = entries
    target.load_checkpoint(str(folder))
