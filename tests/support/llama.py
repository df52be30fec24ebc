"""A small Llama checkpoint, with the names of transformers or of Megatron."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.handmade import WRITER
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save.commit import commit
from unickpt.checkpoint.save.data_file import write_rank
from unickpt.checkpoint.save.shards import Contribution, Shard, prepare, shards_of_flat_range
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.transform.dialects.registry import dialect

HIDDEN, FFN, VOCAB, LAYERS = 8, 12, 7, 2
FACTS = {"heads": 4, "groups": 2, "head_dim": 2, "layers": LAYERS}
HF: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
for layer in range(LAYERS):
    HF |= {
        f"model.layers.{layer}.{name}.weight": shape
        for name, shape in {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (8, HIDDEN),
            "self_attn.k_proj": (4, HIDDEN), "self_attn.v_proj": (4, HIDDEN), "self_attn.o_proj": (HIDDEN, 8),
            "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        }.items()
    }  # fmt: skip
MEGATRON: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (10, HIDDEN), "output_layer.weight": (10, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 16, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, 8),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
}  # fmt: skip
LLAMA = dialect("megatron-core", "llama")
Values = dict[tuple[str, str], torch.Tensor]


def values_of(shapes: Mapping[str, tuple[int, ...]]) -> Values:
    """Return masters and moments with unique numbers. All but a few weights are the cast of their masters."""
    found: Values = {}
    at = 1
    for name, shape in shapes.items():
        for state in ("master", "exp_avg"):
            count = math.prod(shape)
            found[name, state] = (torch.arange(at, at + count, dtype=torch.float32) / 7).reshape(shape)
            at += count
        found[name, "weight"] = found[name, "master"].to(torch.bfloat16)
    some = next(name for name in shapes if "q_proj" in name or "linear_qkv.weight" in name)
    found[some, "weight"][-1, 1:4] = 99.0
    return found


def saved(
    folder: Path, values: Values, *, aliases: Mapping[str, str], split: bool = False, dialect: str = "huggingface",
    model: dict[str, Any] | None = None,
) -> Checkpoint:  # fmt: skip
    """Save on three ranks, with flat ranges that have unusual boundaries."""
    names = sorted({name for name, _ in values})
    norms = [name for name in names if "norm" in name]
    others = [name for name in names if name not in norms]
    if split:
        norms.append(others.pop(next(at for at, name in enumerate(others) if "k_proj" in name)))
    infos = {
        (name, state): TensorInfo(
            name, state, "BF16" if state == "weight" else "F32", tuple(value.shape),
            "optimizer" if state == "exp_avg" else "parameter", "master" if state == "weight" else None,
        )
        for (name, state), value in values.items()
    }  # fmt: skip
    optimizer = OptimizerRecord(
        "AdamW",
        (ParameterGroup({"weight_decay": 0.1}, tuple(others)), ParameterGroup({"weight_decay": 0.0}, tuple(norms))),
        (ParameterGroup({"step": 3.0}, tuple(names)),),
    )
    storage = PosixStorage(folder)
    records = []
    for rank in range(3):
        shards: list[Shard] = []
        for key, value in values.items():
            total = value.numel()
            lo, hi = total * rank // 3, total * (rank + 1) // 3
            if key[1] != "weight":
                shards += shards_of_flat_range(infos[key], lo, hi, value.reshape(-1)[lo:hi])
            elif rank == 0 and (value == 99.0).any():
                at = (value == 99.0).nonzero()
                box = Box(tuple(at.min(0).values.tolist()), tuple((at.max(0).values - at.min(0).values + 1).tolist()))
                shards.append(Shard(infos[key], box, value[box.slices()].contiguous()))
        part = Contribution(
            shards=shards,
            tensors=list(infos.values()),
            step=3,
            optimizer=optimizer,
            aliases=dict(aliases),
            writer=dataclasses.replace(WRITER, dialect=dialect, model=model or {}),
        )
        records.append(
            write_rank(
                storage, f"data/rank{rank:05d}.safetensors", f"rows/rank{rank:05d}.safetensors", prepare(part, rank), rank
            )
        )
        if rank == 0:
            first = prepare(part, 0)
    commit(storage, records, first, generation=0)
    return Checkpoint.open(folder)
