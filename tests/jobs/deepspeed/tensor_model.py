"""A small Transformer with every kind of layer that AutoTP divides, and the configuration that divides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as functional

from tests.jobs.deepspeed.model import LENGTH, VOCABULARY

HEADS, KEY_HEADS, HEAD = 8, 4, 3  # 4 heads of keys do not divide evenly among 3 ranks
WIDTH, KEYS = HEADS * HEAD, KEY_HEADS * HEAD
INNER = 11  # divides evenly among no number of ranks


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Attention of the heads of this rank, with ``norm`` applied to each query head."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    q = q * norm
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Fused(nn.Module):
    """A block with fused projections of queries, keys and values, and of gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_norm = nn.Parameter(torch.ones(HEAD))
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * KEYS)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"gate_up": nn.Linear(WIDTH, 2 * INNER), "both": nn.Linear(2 * INNER, WIDTH, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(self.norm(x))
        keys = qkv.shape[-1] // (HEADS // KEY_HEADS + 2)
        q, k, v = qkv.split([qkv.shape[-1] - 2 * keys, keys, keys], dim=-1)
        x = x + self.o_proj(attention(q, k, v, self.query_norm))
        gate, up = self.mlp["gate_up"](x).chunk(2, dim=-1)
        return x + self.mlp["both"](torch.cat([functional.silu(gate) * up, gate], dim=-1))


class Separate(nn.Module):
    """A block with a projection each, a frozen one, and a matrix that DeepSpeed describes with three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.Parameter(torch.ones(HEAD))
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, KEYS, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEYS)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.ModuleDict({"pair": nn.Linear(WIDTH, 2 * INNER), "down": nn.Linear(INNER, WIDTH)})
        self.v_proj.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o_proj(attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.query_norm))
        one, other = self.mlp["pair"](x).chunk(2, dim=-1)
        return x + self.mlp["down"](one * torch.tanh(other))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, INNER)  # divided along its columns, which a row-parallel layer takes
        self.place_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Fused(), Separate()])
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1, requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3, 5))
        self.register_buffer("volatile", torch.rand(4), persistent=False)
        self.loss_function: Any = loss_function

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place_proj(self.places(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x + self.shift) * self.gain * self.scale.mean().to(x.dtype))
        loss: torch.Tensor = self.loss_function(logits, labels=tokens)
        return loss


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token. AutoTP replaces it if a rank has a part of the vocabulary."""
    return functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def _spec(kind: str, *patterns: str, **more: Any) -> dict[str, Any]:
    return {"partition_type": kind, "patterns": [rf".*{pattern}\.weight$" for pattern in patterns], **more}


def division(vocabulary: str) -> list[dict[str, Any]]:
    """Return the ``layer_specs`` of the model. ``vocabulary`` is that of ``TensorLayout``."""
    return [
        _spec("column", r"\.qkv_proj", shape=[[WIDTH, KEYS, KEYS], -1], partition_dim=0),
        _spec("column", r"\.mlp\.gate_up", shape=[2, -1], partition_dim=0),
        _spec("row", r"\.mlp\.both", shape=[-1, [INNER, INNER]], partition_dim=1),
        _spec("column", r"\.mlp\.pair", shape=[2, -1, WIDTH], partition_dim=1),
        _spec("column", r"\.[qkv]_proj"),
        _spec("row", r"\.o_proj", r"\.mlp\.down", "place_proj", "places"),
        {"partition_type": "skip", "patterns": [r".*query_norm$"], "grad_allreduce": True},
        *([_spec("row", "lm_head")] if vocabulary == "columns" else []),
    ]
