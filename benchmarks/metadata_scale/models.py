"""Shapes of large models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter.

    Attributes:
        shape: global shape. The first dimension of an expert weight is the number of experts.
        split: dimension that tensor parallelism divides; None for a copy on every rank.
        expert: expert parallelism divides the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    expert: bool = False


@dataclass(frozen=True)
class Model:
    """A model. Pipeline stages get equal numbers of ``slots``, in order. Embedding and head are slots too."""

    title: str
    slots: tuple[tuple[Parameter, ...], ...]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for slot in self.slots for parameter in slot)

    def stage(self, stage: int, stages: int) -> range:
        """Return the positions in ``parameters`` of one pipeline stage."""
        ends = np.cumsum([0, *map(len, self.slots)]).tolist()
        first, last = (len(self.slots) * at // stages for at in (stage, stage + 1))
        return range(ends[first], ends[last])


def llama_405b() -> Model:
    """Llama 3 405B with its published shapes. 126 layers, embedding and head are 128 slots, eight for each of 16 stages."""
    hidden, ffn, key_value, words = 16384, 53248, 8 * 128, 128256
    slots = [(Parameter("model.embed_tokens.weight", (words, hidden), 0),)]
    for layer in range(126):
        shapes = {
            "input_layernorm": ((hidden,), None),
            "self_attn.q_proj": ((hidden, hidden), 0),
            "self_attn.k_proj": ((key_value, hidden), 0),
            "self_attn.v_proj": ((key_value, hidden), 0),
            "self_attn.o_proj": ((hidden, hidden), 1),
            "post_attention_layernorm": ((hidden,), None),
            "mlp.gate_proj": ((ffn, hidden), 0),
            "mlp.up_proj": ((ffn, hidden), 0),
            "mlp.down_proj": ((hidden, ffn), 1),
        }
        slots.append(tuple(Parameter(f"model.layers.{layer}.{k}.weight", s, split) for k, (s, split) in shapes.items()))
    slots.append((Parameter("model.norm.weight", (hidden,)), Parameter("lm_head.weight", (words, hidden), 0)))
    return Model("Llama 3 405B", tuple(slots))


def moe_1t() -> Model:
    """A 1T mixture of experts with the published shapes of Kimi K2, the largest open one: 384 experts, 8 active.

    The experts of a layer are one tensor with a dimension of experts, as in Megatron's checkpoints.
    """
    hidden, ffn, experts, words = 7168, 2048, 384, 163840
    slots = [(Parameter("embedding.word_embeddings.weight", (words, hidden), 0),)]
    for layer in range(61):
        attention = {
            "input_layernorm": ((hidden,), None),
            "self_attention.linear_q_down_proj": ((1536, hidden), None),
            "self_attention.q_layernorm": ((1536,), None),
            "self_attention.linear_q_up_proj": ((64 * 192, 1536), 0),
            "self_attention.linear_kv_down_proj": ((576, hidden), None),
            "self_attention.kv_layernorm": ((512,), None),
            "self_attention.linear_kv_up_proj": ((64 * 256, 512), 0),
            "self_attention.linear_proj": ((hidden, 64 * 128), 1),
            "pre_mlp_layernorm": ((hidden,), None),
        }
        wide = 18432 if layer == 0 else ffn  # the first layer is dense; the others have one shared expert
        block = "mlp" if layer == 0 else "mlp.shared_experts"
        attention |= {f"{block}.gate": ((wide, hidden), 0), f"{block}.up": ((wide, hidden), 0)}
        attention |= {f"{block}.linear_fc2": ((hidden, wide), 1)}
        if layer:
            attention |= {"mlp.router": ((experts, hidden), None)}
        slot = [Parameter(f"decoder.layers.{layer}.{k}.weight", s, split) for k, (s, split) in attention.items()]
        if layer:
            stem = f"decoder.layers.{layer}.mlp.experts.experts"
            slot.append(Parameter(f"{stem}.gate.weight", (experts, ffn, hidden), expert=True))
            slot.append(Parameter(f"{stem}.up.weight", (experts, ffn, hidden), expert=True))
            slot.append(Parameter(f"{stem}.linear_fc2.weight", (experts, hidden, ffn), expert=True))
        slots.append(tuple(slot))
    slots.append((Parameter("final_layernorm.weight", (hidden,)), Parameter("output_layer.weight", (words, hidden), 0)))
    return Model("1T mixture of experts", tuple(slots))
