"""Experts made of dense models: the outputs are those of the dense model, beside the cube root that Megatron uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from tests.support.grown_models import difference, model_of_table, source, table_of_model
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.edit.table import Table
from unickpt.transform.grow.refusals import NotLosslessError
from unickpt.transform.grow.upcycle import Upcycle

F32 = torch.float32
DENSE = {"attention_bias": False, "mlp_bias": False}
EXACT, MEGATRON = 1e-6, 1e-3


def dense(family: str) -> Any:
    return source(family, dtype=F32, **(DENSE if family == "llama" else {}))


def upcycled(model: Any, experts: int, top_k: int, granularity: int) -> tuple[Table, dict[str, Any]]:
    return Upcycle(experts, top_k, granularity, 0, model.config.to_dict()).result(table_of_model(model))


@pytest.mark.parametrize(("experts", "top_k", "granularity"), [(4, 2, 1), (8, 4, 2), (8, 4, 4), (2, 2, 1)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_outputs_do_not_change(family: str, experts: int, top_k: int, granularity: int) -> None:
    model = dense(family)
    assert difference(model, model_of_table(*upcycled(model, experts, top_k, granularity), F32)) < EXACT


def test_cube_root_is_not_exact() -> None:
    model = dense("llama")
    made = model_of_table(*upcycled(model, 8, 4, 2), F32)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.mlp.experts.gate_up_proj *= 2 ** (1 / 3)
            layer.mlp.experts.down_proj *= 2 ** (-2 / 3)
    assert difference(model, made) > MEGATRON


@pytest.mark.parametrize(
    ("numbers", "more", "kind"),
    [
        ((8, 3, 2), {}, "top-k"),
        ((7, 2, 2), {}, "granularity"),
        ((10, 5, 5), {}, "granularity"),
        ((4, 2, 1), {"hidden_act": "gelu"}, "activation"),
        ((4, 2, 1), {"mlp_bias": True}, "bias"),
    ],
)
def test_refusals(numbers: tuple[int, int, int], more: dict[str, Any], kind: str) -> None:
    with pytest.raises(NotLosslessError) as error:
        upcycled(source("llama", dtype=F32, **{**DENSE, **more}), *numbers)
    assert [each.kind for each in error.value.refusals] == [kind]


def test_families() -> None:
    with pytest.raises(NotLosslessError, match="known are llama, mistral, qwen3"):
        upcycled(source("gpt2"), 4, 2, 1)


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    model = dense("qwen3")
    model.save_pretrained(tmp_path / "dense")
    numbers = ["--experts", "8", "--top-k", "4", "--granularity", "2"]
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "experts"), *numbers]) == 0
    assert main(["export", str(tmp_path / "experts"), str(tmp_path / "exported")]) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert type(made).__name__ == "Qwen3MoeForCausalLM"
    assert difference(model, made) < EXACT


def test_the_function_and_the_command_make_the_same(tmp_path: Path) -> None:
    dense("llama").save_pretrained(tmp_path / "dense")
    made = unickpt.upcycle_checkpoint(tmp_path / "dense", tmp_path / "function", experts=4, top_k=2)
    numbers = ["--experts", "4", "--top-k", "2"]
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "command"), *numbers]) == 0
    assert made.config == json.loads((tmp_path / "command" / "model" / "config.json").read_text())
    one, other = (Checkpoint.open(tmp_path / name) for name in ("function", "command"))
    assert one.ids.keys() == other.ids.keys()
    assert all(torch.equal(one.read_tensor(*info.key), other.read_tensor(*info.key)) for info in one.index.tensors)
