"""Predicted errors of layers in bf16, from handmade checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart, convert
from unickpt.transform.quantise import narrowing
from unickpt.transform.quantise.narrowing import narrowing_errors

SHAPES = {
    "layers.1.up.weight": (24, 16), "layers.1.down.weight": (16, 24), "layers.10.up.weight": (24, 16, 3),
    "decoder.layers.fc.weight": (3, 8, 16),
}  # fmt: skip


def written(folder: Path, *, moments: bool = True) -> dict[tuple[str, str], torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    found = {(name, "weight"): torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    found |= {("layers.1.norm.weight", "weight"): torch.randn(16, generator=made)}
    found |= {("decoder.layers.norm.weight", "weight"): torch.randn(3, 16, generator=made)}
    if moments:
        found |= {(name, "exp_avg_sq"): torch.rand(shape, generator=made) for name, shape in SHAPES.items()}
    parts = []
    for (name, state), value in found.items():
        kind = "parameter" if state == "weight" else "optimizer"
        info = TensorInfo(name, state, name_of(value.dtype), tuple(value.shape), kind)
        parts.append(SourcePart(info, Box.whole(info.shape), lambda box, value=value: value[box.slices()].reshape(-1)))  # type: ignore[misc]
    convert(Source("test", [Portion("all", parts, [])], Writer("test", "", "", "", "deepspeed", {})), folder)
    return found


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_the_error_is_that_of_the_cast_of_its_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(narrowing, "BLOCK_ELEMENTS", block)
    made = written(tmp_path / "ck")
    read: list[int] = []
    found = narrowing_errors(Checkpoint.open(tmp_path / "ck"), ["layers.1", "layers.10"], torch.bfloat16, read.append)
    assert found.indicator == "second-moment"
    for layer, error in zip(("layers.1.", "layers.10."), found.errors, strict=True):
        expected = 0.0
        for name in (each for each in SHAPES if each.startswith(layer)):
            weight, moment = made[name, "weight"], made[name, "exp_avg_sq"]
            expected += float(((weight.bfloat16().double() - weight.double()).square() * moment.double()).sum() / 2)
        assert error == pytest.approx(expected, rel=1e-9)
        assert error > 0
    assert sum(read) == sum(made[name, "weight"].nbytes for name in SHAPES if name.startswith("layers"))


def test_megatrons_layers_are_parts_of_one_tensor(tmp_path: Path) -> None:
    made = written(tmp_path / "ck")
    found = narrowing_errors(Checkpoint.open(tmp_path / "ck"), ["decoder.layers.0", "decoder.layers.2"], torch.bfloat16)
    for number, error in zip((0, 2), found.errors, strict=True):
        weight, moment = (made["decoder.layers.fc.weight", state][number].double() for state in ("weight", "exp_avg_sq"))
        cast = made["decoder.layers.fc.weight", "weight"][number].bfloat16().double()
        assert error == pytest.approx(float(((cast - weight).square() * moment).sum() / 2), rel=1e-9)
    with pytest.raises(MismatchError, match=r"has no weights of layer decoder\.layers\.3"):
        narrowing_errors(Checkpoint.open(tmp_path / "ck"), ["decoder.layers.3"], torch.bfloat16)


def test_without_second_moments_it_is_the_change_of_the_weights(tmp_path: Path) -> None:
    made = written(tmp_path / "ck", moments=False)
    found = narrowing_errors(Checkpoint.open(tmp_path / "ck"), ["layers.10"], torch.bfloat16)
    weight = made["layers.10.up.weight", "weight"]
    assert found.indicator == "weight-error"
    assert found.errors[0] == pytest.approx(float((weight.bfloat16().double() - weight.double()).square().sum()), rel=1e-9)


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    written(tmp_path / "ck")
    with pytest.raises(MismatchError, match=r"has no weights of layer layers\.2, such as layers\.2\.weight"):
        narrowing_errors(Checkpoint.open(tmp_path / "ck"), ["layers.2"], torch.bfloat16)
