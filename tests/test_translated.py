"""A checkpoint of one dialect read by a job of another: every box of every state, against the arrays that were stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.handmade import WRITER
from tests.test_language import carried_out
from unickpt.commit import commit
from unickpt.contribution import Contribution, Shard, prepare, shards_of_flat_range
from unickpt.errors import MismatchError
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.language.rules import Rule
from unickpt.language.shipped import dialect
from unickpt.language.translation import translate
from unickpt.loading import Checkpoint
from unickpt.manifest import OptimizerRecord, ParameterGroup
from unickpt.posix import PosixStorage
from unickpt.reading import Request
from unickpt.translated import TranslatedCheckpoint, shapes_of, translated
from unickpt.writing import write_rank

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
    """Masters and moments with numbers that are nowhere else; weights that are the cast of masters, but for a few."""
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
    """Three ranks with flat ranges of it, cut where nothing else is."""
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


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Values]:
    """As transformers names it, with a tied head."""
    values = values_of(HF)
    folder = tmp_path_factory.mktemp("hf") / "step3"
    return saved(folder, values, aliases={"lm_head.weight": "model.embed_tokens.weight"}), values


def expected(view: TranslatedCheckpoint, values: Values, state: str) -> dict[str, np.ndarray[Any, Any]]:
    shapes, stored = shapes_of(view.source)
    given = {name: values[stored[name], state].float().numpy() for name in shapes}
    wanted = {info.name: np.zeros(info.shape, np.float32) for info in view.index.tensors}
    return carried_out(view.translation, wanted, given)


def test_all_states_of_all_tensors(there: tuple[Checkpoint, Values]) -> None:
    checkpoint, values = there
    view = translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))
    assert view.translation.unmatched == []
    assert view.translation.without == {}
    assert view.translation.unused == []
    assert {info.key for info in view.index.tensors} == {(n, s) for n in MEGATRON for s in ("exp_avg", "master", "weight")}
    for state in ("master", "exp_avg", "weight"):
        want = expected(view, values, state)
        for name, shape in MEGATRON.items():
            read = view.read_tensor(name, state)
            assert tuple(read.shape) == shape
            assert np.array_equal(read.float().numpy(), want[name]), (name, state)
    assert (want["decoder.layers.self_attention.linear_qkv.weight"] == 99.0).sum() == 3


@pytest.mark.parametrize("seed", range(20))
def test_any_boxes_into_any_strides(there: tuple[Checkpoint, Values], seed: int) -> None:
    """What a rank with a part of the tensors asks for; and it reads no fragment that it does not need."""
    checkpoint, values = there
    view = translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))
    want = expected(view, values, "exp_avg")
    chance = np.random.default_rng(seed)
    requests, wholes = [], []
    for name, shape in MEGATRON.items():
        start = [int(chance.integers(0, extent)) for extent in shape]
        box = Box(tuple(start), tuple(int(chance.integers(1, n - a + 1)) for a, n in zip(start, shape, strict=True)))
        whole = torch.full([extent * 2 for extent in box.shape], -1.0, dtype=(torch.float64, torch.float32)[seed // 2 % 2])
        out = whole[tuple(slice(None, None, 2) for _ in box.shape)] if seed % 2 else torch.full((box.numel,), -1.0)
        requests.append(Request(view.ids[name, "exp_avg"], box, out))
        wholes.append((whole, name, box))
    stats = view.read(requests)
    for request, (whole, name, box) in zip(requests, wholes, strict=True):
        assert np.array_equal(request.place.numpy(), want[name][box.slices()].astype(request.out.numpy().dtype)), name
        if seed % 2:
            assert (whole == -1.0).sum() == whole.numel() - box.numel  # and nothing beside it
    padding = sum(max(box.stop[0] - VOCAB, 0) and (box.stop[0] - max(box.start[0], VOCAB)) * box.shape[1]
                  for _, name, box in wholes if "vocab" in name or "embedding" in name or "output" in name)  # fmt: skip
    assert stats.bytes_needed == 4 * (sum(box.numel for _, _, box in wholes) - padding)


def test_hyperparameters_go_with_their_parameters(there: tuple[Checkpoint, Values]) -> None:
    view = translated(there[0], LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))
    record = view.manifest.optimizer
    assert record is not None
    decayed, plain = (set(group.parameters) for group in record.groups)
    assert plain == {name for name in MEGATRON if "norm" in name}
    assert decayed == MEGATRON.keys() - plain
    assert set(record.scalars[0].parameters) == set(MEGATRON)


def test_parts_with_other_hyperparameters_cannot_be_one(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "s", values_of(HF), aliases={}, split=True)
    with pytest.raises(MismatchError, match=r"linear_qkv.*is made of .*_proj.weight and .*other hyperparameters"):
        translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    values = values_of(HF)
    values["model.norm.weight", "exp_avg"] = torch.ones(HIDDEN + 1)
    checkpoint = saved(tmp_path / "s", values, aliases={})
    with pytest.raises(MismatchError, match=r"model.norm.weight \(exp_avg\) is \(9,\), its parameter is not"):
        translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))


def test_there_and_back(there: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    """Stored as Megatron has it, and read as transformers has it: the same bits."""
    view = translated(there[0], LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))
    values = {info.key: view.read_tensor(*info.key) for info in view.index.tensors}
    stored = saved(tmp_path / "s", values, aliases={})
    wanted = {**HF, "lm_head.weight": HF["model.embed_tokens.weight"]}
    back = translated(stored, LLAMA.rules, wanted, LLAMA.sizes_of(FACTS), outward=True)
    for (name, state), value in there[1].items():
        assert torch.equal(back.read_tensor(name, state), value), (name, state)
    assert torch.equal(back.read_tensor("lm_head.weight", "exp_avg"), there[1]["model.embed_tokens.weight", "exp_avg"])


def test_means_and_sums(there: tuple[Checkpoint, Values]) -> None:
    rules = [Rule.parse("mean [n]", "model.layers.{layer}.input_layernorm.weight [n]", repeat={"layer": "mean"}),
             Rule.parse("sum [n]", "model.layers.{layer}.input_layernorm.weight [n]", repeat={"layer": "sum"})]  # fmt: skip
    view = translated(there[0], rules, {"mean": (HIDDEN,), "sum": (HIDDEN,)}, {"layer": LAYERS})
    stack = torch.stack([there[1][f"model.layers.{layer}.input_layernorm.weight", "master"] for layer in range(LAYERS)])
    assert torch.equal(view.read_tensor("mean", "master"), stack[0] * 0.5 + stack[1] * 0.5)
    assert torch.equal(view.read_tensor("sum", "master"), stack.sum(0))
    place = torch.empty(HIDDEN, dtype=torch.bfloat16)  # rounded once, after the sum
    view.read([Request(view.ids["sum", "master"], Box((0,), (HIDDEN,)), place)])
    assert torch.equal(place, stack.sum(0).to(torch.bfloat16))
    assert torch.equal(view.read_tensor("sum", "weight"), stack.sum(0).to(torch.bfloat16))


def test_what_is_not_there_is_said(there: tuple[Checkpoint, Values]) -> None:
    wanted = {**MEGATRON, "decoder.layers.self_attention.linear_qkv.bias": (LAYERS, 16), "other": (3,)}
    view = translated(there[0], LLAMA.rules, wanted, LLAMA.sizes_of(FACTS))
    assert view.translation.unmatched == ["other"]
    assert view.translation.without["decoder.layers.self_attention.linear_qkv.bias"][0].endswith("k_proj.bias")
    assert view.info("other", "master") is None
    assert translate(LLAMA.rules, {}, HF, {}).unused == list(HF)
