"""Converted torch_dist checkpoints of Megatron equal unickpt's own of the same job, and load under other shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.converted import (
    ITERATION, assert_loaded, assert_same_hyperparameters_and_steps, assert_same_tensors, fixtures, opened,
)  # fmt: skip
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

pytest.importorskip("megatron.core")

FLAT = "gpt-tp2pp2-dist"
SOURCES = {FLAT: "gpt-pp2dp2-plain", "moe-tp2ep2dp2-plain": "moe-ep2dp4-dist", "gpt-tp2dp2-fp32": "gpt-tp4-dist"}


folder, name = fixtures("tests.jobs.megatron.dist_worker", SOURCES)


def test_tensors_equal_those_that_unickpt_saves(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same_tensors(folder, name, capsys)


def test_hyperparameters_and_steps_equal_those_that_unickpt_saves(folder: Path, name: str) -> None:
    assert_same_hyperparameters_and_steps(folder, name)


def test_objects_are_kept(folder: Path) -> None:
    found, _ = opened(folder, FLAT)
    common = found.objects().value["common"]
    assert common["opt_param_scheduler"] == {"max_lr": 0.01, "num_steps": 8}
    assert common["args"].num_layers == 4
    assert common["args"].params_dtype == torch.bfloat16
    assert "optimizer" not in common
    writer = found.manifest.writer
    assert (writer.dialect, writer.topology) == ("megatron-core", {"world_size": 4, "tensor": 2, "pipeline": 2})
    assert writer.model == {"family": "", "facts": {"layers": 4, "heads": 4, "groups": 4, "head_dim": 8, "vocab": 96}}
    assert found.manifest.step == 2
    (state,) = found.shared_object("rng_state/shard_1.0_2.2").value
    assert state["torch_rng_state"].dtype == torch.uint8
    assert state["random_rng_state"] == (3, (1, 2), None)


@pytest.mark.parametrize(("source", "target"), SOURCES.items())
def test_the_converted_checkpoint_loads_under_another_shape(folder: Path, source: str, target: str) -> None:
    assert_loaded(folder, source, target)


def test_the_output_lists_what_is_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / FLAT / ITERATION), str(tmp_path / "out")]) == 0
    assert "left out: args.attention_backend is an object of megatron.core" in capsys.readouterr().out


def test_the_optimizers_buckets_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / f"{FLAT}-buckets"), str(tmp_path / "out")]) == 2  # no tracker file: not a checkpoint
    assert main(["convert", str(folder / f"{FLAT}-buckets" / ITERATION), str(tmp_path / "out")]) == 2
    assert "--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_states_that_megatron_has_misplaced_are_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's fully reshardable form has states of other elements after a padded bucket."""
    assert main(["convert", str(folder / "padded"), str(tmp_path / "out")]) == 0
    assert "is not near its master" in capsys.readouterr().out
    found = Checkpoint.open(tmp_path / "out")
    truth = torch.load(folder / "padded.truth")
    assert {info.state for info in found.index.tensors if info.kind != "object"} == {"weight"}
    assert {info.name for info in found.index.tensors if info.kind != "object"} == {
        key.removeprefix("weight/") for key in truth if key.startswith("weight/")
    }


def test_the_truth_of_the_tests_has_states_where_they_belong(folder: Path) -> None:
    truth = torch.load(folder / "padded.truth")
    weights = {key: value for key, value in truth.items() if key.startswith("weight/")}
    assert weights
    assert all(torch.equal(value, truth[key.replace("weight/", "master/")].to(value.dtype)) for key, value in weights.items())
