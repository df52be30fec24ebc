"""Errors that are measured on the outputs of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme

UNITS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def llama() -> Any:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 30, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()


@torch.no_grad()
def test_errors_are_divergences_and_the_weights_stay(tmp_path: Path) -> None:
    model = llama()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tokens = torch.randint(0, 30, (5, 7), generator=torch.Generator().manual_seed(2))
    batches = [{"input_ids": tokens[:2]}, {"input_ids": tokens[2:]}]
    found = unickpt.measure_rounding(model, batches, tmp_path / "errors.json", schemes=("4/32", "8", "16"))
    assert json.loads((tmp_path / "errors.json").read_text())["errors"] == found
    assert set(found) == {f"model.layers.{layer}.{unit}" for layer in range(2) for unit in UNITS}
    assert all(set(own) == {"4/32", "8/channel"} for own in found.values())  # 128 does not divide the rows
    assert all(own["4/32"] > own["8/channel"] > 0 for own in found.values())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    whole = model(input_ids=tokens).logits.double().log_softmax(-1)
    for part in ("gate_proj", "up_proj"):
        weight = getattr(model.model.layers[1].mlp, part).weight
        weight.copy_(restored(*rounded(weight, Scheme(4, 32), torch.bfloat16)))
    scores = model(input_ids=tokens).logits.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(scores, whole, reduction="sum", log_target=True) / tokens.numel()
    assert found["model.layers.1.mlp.gate_up_proj"]["4/32"] == pytest.approx(float(expected), rel=1e-3)
    labelled = [{**batch, "labels": batch["input_ids"]} for batch in batches[1:]]
    second = unickpt.measure_rounding(llama(), labelled, tmp_path / "labelled.json", schemes=("4/32",))
    alone = unickpt.measure_rounding(llama(), batches[1:], tmp_path / "alone.json", schemes=("4/32",))
    growth = float(model(**labelled[0]).loss - llama()(**labelled[0]).loss)  # with the unit that is rounded above
    name = "model.layers.1.mlp.gate_up_proj"
    assert second[name]["4/32"] - alone[name]["4/32"] == pytest.approx(growth, rel=1e-3)
