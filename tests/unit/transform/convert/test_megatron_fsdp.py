"""``fsdp_dtensor`` of Megatron FSDP: names, stacks of layers, halves of gated projections, hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

LAYERS = 3
VALUES = {"lr": 1e-3, "wd_mult": 1.0, "betas": (0.9, 0.95), "step": 7}


def weights() -> dict[str, torch.Tensor]:
    """The weights of a small model by their names in the module; ``_w`` and ``_v`` are the halves of a gated projection."""
    generator = torch.Generator().manual_seed(1)
    found = {"embedding.word_embeddings.weight": torch.randn(8, 4, generator=generator)}
    for layer in range(LAYERS):
        for half in "wv":
            found[f"decoder.layers.{layer}.mlp.linear_fc1.weight_{half}"] = torch.randn(6, 4, generator=generator)
        found[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = torch.randn(4, 6, generator=generator)
        found[f"decoder.layers.{layer}.input_layernorm.weight"] = torch.randn(4, generator=generator)
    return found


def saved(folder: Path, held: dict[str, torch.Tensor]) -> Path:
    """Save a state dict with the keys of Megatron FSDP."""
    optimizer: dict[str, Any] = {
        "state": {f"module.module.module.{n}": {"exp_avg": v + 1, "exp_avg_sq": v * v} for n, v in held.items()},
        "param_to_group_meta": {f"module.module.module.{n}": dict(VALUES) for n in held},
    }
    state = {"model": {f"module.{n}": v for n, v in held.items()}, "optimizer": optimizer, "iteration": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def test_the_tensors_have_megatrons_names(tmp_path: Path) -> None:
    held = weights()
    assert main(["convert", str(saved(tmp_path / "fsdp", held)), str(tmp_path / "out")]) == 0
    found = Checkpoint.open(tmp_path / "out")
    assert (found.manifest.step, found.manifest.writer.dialect) == (7, "megatron-core")
    gated = torch.stack([
        torch.cat([held[f"decoder.layers.{at}.mlp.linear_fc1.weight_{half}"] for half in "wv"]) for at in range(LAYERS)
    ])  # fmt: skip
    expected = {
        "embedding.word_embeddings.weight": held["embedding.word_embeddings.weight"],
        "decoder.layers.mlp.linear_fc1.weight": gated,
        "decoder.layers.mlp.linear_fc2.weight": torch.stack(
            [held[f"decoder.layers.{at}.mlp.linear_fc2.weight"] for at in range(LAYERS)]
        ),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.stack(
            [held[f"decoder.layers.{at}.input_layernorm.weight"] for at in range(LAYERS)]
        ),
    }
    assert {info.name for info in found.index.tensors if info.kind != "object"} == set(expected)
    for name, value in expected.items():
        for state, want in (("weight", value), ("master", value), ("exp_avg", value + 1), ("exp_avg_sq", value * value)):
            assert torch.equal(found.read_tensor(name, state), want), (name, state)
    record = found.manifest.optimizer
    assert record is not None
    assert [(set(group.parameters), group.hyperparameters["lr"]) for group in record.groups] == [(set(expected), 1e-3)]
    assert [(set(entry.parameters), entry.hyperparameters) for entry in record.scalars] == [(set(expected), {"step": 7})]


def loaded(folder: Path, held: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Load a folder into a state dict with the keys of Megatron FSDP, by torch.distributed.checkpoint alone."""
    zeros = {name: torch.zeros_like(value) for name, value in held.items()}
    optimizer: dict[str, Any] = {
        "state": {f"module.module.module.{n}": {"exp_avg": v.clone(), "exp_avg_sq": v.clone()} for n, v in zeros.items()},
        "param_to_group_meta": {f"module.module.module.{n}": dict.fromkeys(VALUES) for n in _without_halves(held)},
    }
    state = {"model": {f"module.{n}": v for n, v in zeros.items()}, "optimizer": optimizer, "iteration": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def _without_halves(names: Iterable[str]) -> set[str]:
    return {name.removesuffix("_w").removesuffix("_v") for name in names}


@pytest.mark.parametrize("norm", ["input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"])
def test_an_export_has_the_names_and_values_that_a_job_asks_for(tmp_path: Path, norm: str) -> None:
    """Layers and halves are apart; a norm has the name in either kind of layer. Hyperparameters belong to whole projections."""
    held = weights()
    assert main(["convert", str(saved(tmp_path / "fsdp", held)), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again"), "--to", "fsdp-dtensor"]) == 0
    assert (tmp_path / "again/latest_checkpointed_iteration.txt").read_text() == "7"
    own = {name.replace("input_layernorm.weight", norm): value for name, value in held.items()}
    state = loaded(tmp_path / "again/iter_0000007", own)
    for name, value in own.items():
        assert torch.equal(state["model"][f"module.{name}"], value)
        states = state["optimizer"]["state"][f"module.module.module.{name}"]
        assert torch.equal(states["exp_avg"], value + 1)
        assert torch.equal(states["exp_avg_sq"], value * value)
    for name in _without_halves(own):
        assert state["optimizer"]["param_to_group_meta"][f"module.module.module.{name}"] == VALUES
    assert state["iteration"] == 7


def test_an_export_is_converted_back(tmp_path: Path) -> None:
    assert main(["convert", str(saved(tmp_path / "fsdp", weights())), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again"), "--to", "fsdp-dtensor"]) == 0
    assert main(["convert", str(tmp_path / "again"), str(tmp_path / "back")]) == 0
    assert main(["diff", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decoder.layers.0.mlp.experts.linear_fc1.weight0": torch.ones(2, 2)}, "experts in fsdp_dtensor are not supported"),
        ({"decoder.layers.1.input_layernorm.weight": torch.ones(5)}, "are not alike, so they are not one tensor"),
        ({"decoder.layers.3.input_layernorm.weight": torch.ones(4), "decoder.layers.5.input_layernorm.weight": torch.ones(4)},
         "are not alike"),
    ],
)  # fmt: skip
def test_what_cannot_be_one_tensor_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, torch.Tensor], reason: str
) -> None:
    folder = saved(tmp_path / "fsdp", weights() | change)
    assert main(["convert", str(folder), str(tmp_path / "out")]) != 0
    assert reason in capsys.readouterr().err
