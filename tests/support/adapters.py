"""Models with LoRA adapters, and checkpoints of their training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart, convert


def llama(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=150, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=150, n_positions=16, n_embd=96, n_layer=2, n_head=4)).to(dtype)


CASES: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "plain": (llama, torch.bfloat16, {"target_modules": ["q_proj", "v_proj"]}),
    "float32": (llama, torch.float32, {"target_modules": "all-linear", "r": 70, "lora_alpha": 11}),
    "half": (llama, torch.float16, {"target_modules": ["down_proj"], "use_rslora": True}),
    "patterns": (
        llama, torch.bfloat16,
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 3}, "alpha_pattern": {r"1\.self_attn\.q_proj": 5}},
    ),
    "embedding": (llama, torch.bfloat16, {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}),
    "transposed": (gpt2, torch.bfloat16, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}  # fmt: skip


def adapted(case: str) -> Any:
    """Return a peft model with adapters that are not zero."""
    from peft import LoraConfig, get_peft_model

    build, dtype, options = CASES[case]
    model = get_peft_model(build(dtype), LoraConfig(**{"r": 8, "lora_alpha": 12, "task_type": "CAUSAL_LM", **options}))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def saved(model: Any, folder: Path, *, frozen: bool = True) -> None:
    """Save a checkpoint as in training: masters and moments of the trained parameters, and the others on request."""
    parts: list[SourcePart] = []
    derived: list[TensorInfo] = []

    def add(name: str, state: str, kind: str, value: torch.Tensor) -> None:
        value = value.detach().clone()
        info = TensorInfo(name, state, name_of(value.dtype), tuple(value.shape), kind)
        parts.append(SourcePart(info, Box.whole(info.shape), partial(_box_of, value)))

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    excluded = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            add(name, "master", "parameter", parameter.float())
            add(name, "exp_avg", "optimizer", torch.ones_like(parameter).float())
            derived.append(TensorInfo(name, "weight", name_of(parameter.dtype), tuple(parameter.shape), "parameter", "master"))
        elif frozen:
            add(name, "weight", "parameter", parameter)
        else:
            excluded.append(name)
    aliases = {
        name: first for name, value in model.named_parameters(remove_duplicate=False)
        for first in [next(n for n, p in model.named_parameters() if p is value)] if first != name
    }  # fmt: skip
    convert(
        Source(
            "test", [Portion("all", parts, [])], Writer("deepspeed", "", "", "", "huggingface", {}), step=5, tensors=derived,
            optimizer=OptimizerRecord("AdamW", (ParameterGroup({"lr": 1.0}, tuple(trained)),), ()), aliases=aliases,
            excluded=tuple(excluded),
        ),
        folder,
    )  # fmt: skip


def _box_of(value: torch.Tensor, box: Box) -> torch.Tensor:
    return value[box.slices()].reshape(-1)
