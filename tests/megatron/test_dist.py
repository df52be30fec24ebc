"""Megatron's own torch_dist checkpoints become what the adapter writes of the same job, and load under other shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import torchrun
from unickpt.cli.main import main
from unickpt.loading import Checkpoint
from unickpt.manifest import ParameterGroup

pytest.importorskip("megatron.core")

SOURCES = ("gpt-tp2pp2-dist", "moe-tp2ep2dp2-plain", "gpt-tp2dp2-fp32")
LOADS = (
    ("gpt-tp2pp2-dist", "gpt-pp2dp2-plain"),
    ("moe-tp2ep2dp2-plain", "moe-ep2dp4-dist"),
    ("gpt-tp2dp2-fp32", "gpt-tp4-dist"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved, converted, loaded."""
    folder = tmp_path_factory.mktemp("torch_dist")
    torchrun(4, "tests.megatron.dist_worker", "save", str(folder), *SOURCES)
    for name in SOURCES:
        assert main(["convert", str(folder / name), str(folder / name / "converted")]) == 0
    torchrun(4, "tests.megatron.dist_worker", "load", str(folder), *(name for pair in LOADS for name in pair))
    return folder


def opened(folder: Path, name: str) -> tuple[Checkpoint, Checkpoint]:
    return Checkpoint.open(folder / name / "converted"), Checkpoint.open(folder / name / "ours")


@pytest.mark.parametrize("name", SOURCES)
def test_the_tensors_are_those_of_the_adapter(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, ours = opened(folder, name)
    tensors = [{info for info in each.index.tensors if info.kind != "object"} for each in (found, ours)]
    assert tensors[0] == tensors[1]
    assert main(["diff", str(folder / name / "converted"), str(folder / name / "ours")]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["verify", str(folder / name / "converted")]) == 0


@pytest.mark.parametrize("name", SOURCES)
def test_hyperparameters_and_steps_are_those_of_the_adapter(folder: Path, name: str) -> None:
    found, ours = (each.manifest.optimizer for each in opened(folder, name))
    assert found is not None
    assert ours is not None
    assert found.name == ours.name
    for what in ("groups", "scalars"):
        here, there = (_by_parameter(getattr(each, what)) for each in (found, ours))
        assert there.items() <= here.items()
        assert here.keys() == {info.name for info in opened(folder, name)[0].index.tensors if info.state == "master"}


def _by_parameter(groups: tuple[ParameterGroup, ...]) -> dict[str, str]:
    return {name: json.dumps(group.hyperparameters, sort_keys=True) for group in groups for name in group.parameters}


def test_objects_are_kept(folder: Path) -> None:
    found, _ = opened(folder, "gpt-tp2pp2-dist")
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


@pytest.mark.parametrize(("source", "target"), LOADS)
def test_it_loads_under_another_shape(folder: Path, source: str, target: str) -> None:
    result: dict[str, Any] = json.loads((folder / f"{source}-{target}.json").read_text())
    assert result["problems"] == []
    assert result["iteration"] == 2
    assert result["groups"]
    assert all(step == 2 and lr == 0.01 for _, lr, step in result["groups"])


def test_what_was_left_out_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / SOURCES[0] / "iter_0000002"), str(tmp_path / "out")]) == 0
    assert "left out: args.attention_backend is an object of megatron.core" in capsys.readouterr().out


def test_the_optimizers_buckets_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", str(folder / f"{SOURCES[0]}-buckets"), str(tmp_path / "out")]) == 2
    )  # no tracker file: not a checkpoint
    assert main(["convert", str(folder / f"{SOURCES[0]}-buckets" / "iter_0000002"), str(tmp_path / "out")]) == 2
    assert "--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
