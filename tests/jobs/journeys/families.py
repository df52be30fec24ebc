"""The same small random models as transformers and megatron-core build them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BATCH, DECAY = 4, 80  # sequences per step; steps of the linear decay of the learning rate to zero
COMMON = 16  # tokens in the data
LAYERS, WIDTH, HEADS, GROUPS, FFN, VOCABULARY, LENGTH = 4, 32, 4, 2, 48, 96, 16


@dataclass(frozen=True)
class Family:
    """Attributes: arguments of transformers' configuration and of Megatron's; tied; positions; ``model_type``; dialect file."""

    huggingface: dict[str, Any]
    megatron: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    position: str = "rope"
    kind: str = ""
    dialect: str = ""

    @property
    def moe(self) -> bool:
        return "num_moe_experts" in self.megatron


_LLAMA = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY, "intermediate_size": FFN, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GATED = {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu",
          "num_query_groups": GROUPS, "layernorm_epsilon": 1e-5}  # fmt: skip
_MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none", "moe_router_dtype": None}  # fmt: skip

FAMILIES = {
    "gpt2": Family(
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": LENGTH,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
        {"ffn_hidden_size": 4 * WIDTH, "activation_func": "gelu_tanh", "num_query_groups": HEADS, "add_bias_linear": True,
         "layernorm_epsilon": 1e-5, "normalization": "LayerNorm", "gated_linear_unit": False},
        tied=True, position="learned_absolute",
    ),
    "llama": Family(_LLAMA, _GATED),
    "mistral": Family({**_LLAMA, "sliding_window": None}, _GATED),
    "qwen2": Family({**_LLAMA, "tie_word_embeddings": True}, {**_GATED, "add_qkv_bias": True}, tied=True),
    "phi3": Family({**_LLAMA, "original_max_position_embeddings": 64}, _GATED),
    "qwen3": Family({**_LLAMA, "head_dim": 16}, {**_GATED, "qk_layernorm": True, "kv_channels": 16}),
    "mixtral": Family(
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},  # Megatron's --rotary-base, by default
        {**_GATED, **_MOE, "moe_ffn_hidden_size": FFN},
    ),
    "deepseek_v3": Family(
        {**_LLAMA, "num_key_value_heads": HEADS, "n_routed_experts": 4, "moe_intermediate_size": 24, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6},  # transformers always has 1e-6 in the inner norms
        {**_GATED, **_MOE, "layernorm_epsilon": 1e-6, "num_query_groups": HEADS, "moe_ffn_hidden_size": 24,
         "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
         "qk_layernorm": True, "rope_type": "rope", "rotary_base": 10000, "rotary_scaling_factor": 1.0, "mscale": 1.0,
         "mscale_all_dim": 1.0,
         "moe_shared_expert_intermediate_size": 24, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0,
         "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
         "moe_layer_freq": [0, 1, 1, 1]},
    ),
    "qwen3_moe": Family(
        {**_LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "mlp_only_layers": []},
        {**_GATED, **_MOE, "moe_ffn_hidden_size": 24, "qk_layernorm": True, "kv_channels": 16},
    ),
}  # fmt: skip


# Models that ``unickpt grow`` makes of those above: their sizes, and Llama's epsilon for the new width.
GROWN_SIZES = {"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
               "intermediate_size": 80}  # fmt: skip
_EPSILON = 1e-5 * WIDTH / 48
GROWN = {
    "llama-grown": Family(
        {**_LLAMA, **GROWN_SIZES, "head_dim": 8, "rms_norm_eps": _EPSILON},
        {**_GATED, "hidden_size": 48, "num_layers": 6, "num_attention_heads": 8, "num_query_groups": 4,
         "ffn_hidden_size": 80, "kv_channels": 8, "layernorm_epsilon": _EPSILON},
        kind="llama",
    ),
}  # fmt: skip


PIPELINES = {"gpt2-pipeline": replace(FAMILIES["gpt2"], dialect=str(Path(__file__).with_name("pipeline.toml")))}


def family_of(name: str) -> Family:
    """Return a family or a grown model of one."""
    return {**FAMILIES, **GROWN, **PIPELINES}[name]


def rows(step: int, batch: int = BATCH) -> Any:
    """Return the tokens of a global batch, int64 ``[batch, length + 1]``. They depend only on the step.

    A few of the vocabulary's, each mostly followed by the same other one: something that can be learnt.
    """
    import torch

    chance = torch.Generator().manual_seed(1000 + step)
    any_one = torch.randint(0, COMMON, (batch, LENGTH + 1), generator=chance)
    rare = torch.rand(batch, LENGTH + 1, generator=chance) < 0.1
    found = any_one.clone()
    for at in range(1, LENGTH + 1):
        found[:, at] = torch.where(rare[:, at], any_one[:, at], (5 * found[:, at - 1] + 3) % COMMON)
    return found


def huggingface_model(name: str, seed: int) -> Any:
    """Return a transformers model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    family = family_of(name)
    config = AutoConfig.for_model(family.kind or name, **family.huggingface)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
