"""Weights rounded by an edit are those of the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.grown_models import source, table_of_model
from tests.support.llama import FACTS, HF, saved, values_of
from tests.support.packed_levels import unpacked
from unickpt.base.errors import ConfigError, FormatError, MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.cli.main import main
from unickpt.transform.convert.pipeline import convert
from unickpt.transform.edit.round_weights import RoundWeights
from unickpt.transform.edit.table import table_of
from unickpt.transform.edit.write import source_of
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme

UP = "model.layers.1.mlp.up_proj.weight"


def llama(folder: Path) -> Any:
    return table_of(saved(folder, values_of(HF), aliases={}, model={"family": "llama", "facts": {**FACTS, "vocab": 7}}))


def test_any_box_has_the_values_of_whole_rows(tmp_path: Path) -> None:
    table = llama(tmp_path)
    made = RoundWeights.parse("4/channel").apply(table)
    weight = values_of(HF)[UP, "weight"]
    whole = restored(*rounded(weight, Scheme(4), torch.bfloat16)).to(torch.bfloat16)
    entry = made.entries[UP, "weight"]
    for box in (Box.whole(weight.shape), Box((3, 2), (4, 5)), Box((0, 7), (1, 1))):
        assert torch.equal(entry.read(box).view(box.shape), whole[box.slices()])
    norm = made.entries["model.norm.weight", "weight"]
    assert torch.equal(norm.read(Box.whole((8,))), values_of(HF)["model.norm.weight", "weight"])
    assert {state for _, state in made.entries} == {"weight"}
    assert made.done[-1].startswith("12 weights rounded: 4/channel; 16 instead")  # rows of 12 fill no words


@pytest.mark.hf
@pytest.mark.parametrize(("family", "bits"), [("llama", "4/16"), ("qwen3_moe", "8/channel")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_values_are_those_of_the_exported_files(family: str, bits: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = source(family, dtype=dtype)
    convert(source_of(table_of_model(model), []), tmp_path / "run")
    model.config.save_pretrained(str(tmp_path))
    assert main(["edit", str(tmp_path / "run"), str(tmp_path / "rounded"), "--bits", bits]) == 0
    more = ["--config", str(tmp_path)]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "packed"), "--to", "vllm", "--bits", bits, *more]) == 0
    assert main(["export", str(tmp_path / "rounded"), str(tmp_path / "plain"), *more]) == 0
    packed, plain = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("packed", "plain"))
    count = 0
    for name, value in plain.items():
        if f"{name}_packed" in packed:
            levels = unpacked(packed[f"{name}_packed"], Scheme.parse(bits).bits)
            assert torch.equal(value, restored(levels, packed[f"{name}_scale"]).to(dtype)), name
            count += 1
        else:
            assert torch.equal(value.to(packed[name].dtype), packed[name]), name
    assert count == sum(name.endswith("_packed") for name in packed) > 0


def test_what_cannot_be_rounded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 4, 8 or 16 bits"):
        RoundWeights.parse("5")
    plan = tmp_path / "plan.json"
    plan.write_text('{"schema": 1, "units": []}')
    with pytest.raises(MismatchError, match="it lacks model"):
        RoundWeights.parse(str(plan)).apply(llama(tmp_path / "run"))
    plan.write_text("[]")
    with pytest.raises(FormatError):
        RoundWeights.parse(str(plan))
