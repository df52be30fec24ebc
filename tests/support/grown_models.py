"""Small transformers models as tables, and their grown models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.edit.table import Table, TableEntry
from unickpt.transform.grow.step import Grow

VOCABULARY, TOKENS = 97, (2, 12)
BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GQA = {**BASE, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MLA = {
    **BASE, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GQA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**GQA, "sliding_window": 8},
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 8},
    "phi3": {**GQA, "pad_token_id": 0},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "mixtral": {**GQA, "num_local_experts": 4},
    "qwen2_moe": {**GQA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**GQA, **EXPERTS, "head_dim": 8},
    "deepseek_v2": {**MLA, "q_lora_rank": None},
    "deepseek_v3": {**MLA, "q_lora_rank": 16},
}
WIDTH = {"hidden_size": 48}
DIMENSIONS: dict[str, dict[str, int]] = {
    "width": WIDTH,
    "heads": {"num_attention_heads": 8},
    "kv-heads": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "repeated-kv-heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "depth": {"num_hidden_layers": 5},
    "intermediate": {"intermediate_size": 80},
    "all": {**WIDTH, "num_attention_heads": 12, "num_key_value_heads": 6, "num_hidden_layers": 3, "intermediate_size": 64},
}
EPSILON = 1e-2  # large, so that a wrong epsilon shows


def model_of(config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model of transformers with random weights, whose gains and biases are not those of an initialisation."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoConfig.for_model(**config)
    made._attn_implementation = made._experts_implementation = "eager"  # grouped kernels have no float64
    model = AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def source(family: str, *, tied: bool = False, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Return a small model of a family."""
    epsilon = "layer_norm_epsilon" if family == "gpt2" else "rms_norm_eps"
    config = {"model_type": family, **FAMILIES[family], epsilon: EPSILON, "tie_word_embeddings": tied, **more}
    return model_of(config, dtype=dtype)


def table_of_model(model: Any, **states: dict[str, torch.Tensor]) -> Table:
    """Return a model as a table, with further states by parameter."""
    entries = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        stored = first.setdefault(value.data_ptr(), name)
        if stored != name:
            aliases[name] = stored
            continue
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
        for state, tensor in {
            "weight": value.detach(),
            **{key: each[name] for key, each in states.items() if name in each},
        }.items():
            info = TensorInfo(
                name, state, name_of(tensor.dtype), tuple(tensor.shape), kind if state == "weight" else "optimizer"
            )
            entries[info.key] = TableEntry(info, lambda box, tensor=tensor: tensor[box.slices()].clone().reshape(-1))  # type: ignore[misc]
    config = model.config.to_dict()
    writer = Writer("test", "", "", torch.__version__, "huggingface", {}, Model.of_config(config).as_json())
    return Table("memory", entries, 7, writer, aliases=aliases, identity=("memory",))


def value_of(table: Table, name: str, state: str = "weight") -> torch.Tensor:
    """Return a tensor of a table."""
    entry = table.entries[name, state]
    return entry.read(Box.whole(entry.info.shape)).view(entry.info.shape)


def model_of_table(table: Table, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of a table."""
    model = model_of(config, seed=9, dtype=dtype)
    values = {name: value_of(table, name) for name, state in table.entries if state == "weight"}
    tied = {alias: values[name] for alias, name in table.aliases.items()}
    model.load_state_dict({**values, **tied}, strict=True)
    return model


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of the logits, relative to the largest logit."""
    tokens = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        first, second = one(tokens).logits, other(tokens).logits
    return float((first - second).abs().max() / first.abs().max())


def changes_of(family: str, dimension: str) -> dict[str, int]:
    """Return the changes of a dimension that a family allows."""
    changes = dict(DIMENSIONS[dimension])
    if family == "gpt2":
        changes.pop("num_key_value_heads", None)
        if {"hidden_size", "num_attention_heads"} & changes.keys():
            changes |= {"hidden_size": 48, "num_attention_heads": 6}
    if family.startswith("deepseek"):
        changes.pop("num_key_value_heads", None)
    if "intermediate_size" in changes and "moe_intermediate_size" in FAMILIES[family]:
        changes["moe_intermediate_size"] = 40
        if family.startswith("qwen"):
            del changes["intermediate_size"]  # no layer is dense
    return changes


def grown(model: Any, changes: dict[str, int], place: tuple[int, ...] | None = None, seed: int = 0) -> Any:
    """Return the grown model of a model."""
    table, config = Grow(changes, place, seed, model.config.to_dict()).result(table_of_model(model))
    return model_of_table(table, config, model.dtype)
