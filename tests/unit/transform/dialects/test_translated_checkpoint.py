"""A checkpoint of one dialect read by a job of another: every box of every state, against the arrays that were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.llama import FACTS, HF, HIDDEN, LAYERS, LLAMA, MEGATRON, VOCAB, Values, saved, values_of
from tests.support.translations import carried_out
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.named_here import through_transformers
from unickpt.transform.dialects.registry import dialect
from unickpt.transform.dialects.rules import Rule
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint, shapes_of, translated
from unickpt.transform.dialects.translation import counterpart_shapes, translate


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


def test_names_of_torchtitan_lead_to_megatron_through_those_of_transformers(
    there: tuple[Checkpoint, Values], tmp_path: Path
) -> None:
    checkpoint, values = there
    facts, titan = {**FACTS, "heads": 2, "groups": 1, "head_dim": 4}, dialect("torchtitan", "llama")
    sizes, model = titan.sizes_of(facts), Model(facts=facts)  # Megatron does not know its family
    theirs = translated(checkpoint, titan.rules, counterpart_shapes(titan.rules, shapes_of(checkpoint)[0], sizes), sizes)
    made = {info.key: theirs.read_tensor(*info.key) for info in theirs.index.tensors}
    query = values["model.layers.0.self_attn.q_proj.weight", "master"]
    assert not torch.equal(made["layers.0.attention.qkv_linear.wq.weight", "master"], query), "rotary positions are apart"
    through = through_transformers(saved(tmp_path / "step3", made, aliases={}, dialect="torchtitan"), "megatron-core", model)
    assert (through.manifest.writer.dialect, through.manifest.writer.model["family"]) == ("huggingface", "llama")
    found, direct = (translated(each, LLAMA.rules, MEGATRON, LLAMA.sizes_of(facts)) for each in (through, checkpoint))
    assert found.index.tensors == direct.index.tensors
    for info in direct.index.tensors:
        assert torch.equal(found.read_tensor(*info.key), direct.read_tensor(*info.key)), info.key
    assert through_transformers(checkpoint, "megatron-core", model) is checkpoint


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
    with pytest.raises(
        MismatchError, match=r"sources .*_proj.weight and .*_proj.weight of .*linear_qkv.* different hyperparameters"
    ):
        translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    values = values_of(HF)
    values["model.norm.weight", "exp_avg"] = torch.ones(HIDDEN + 1)
    checkpoint = saved(tmp_path / "s", values, aliases={})
    with pytest.raises(MismatchError, match=r"model.norm.weight \(exp_avg\) has shape \[9\], its parameter has"):
        translated(checkpoint, LLAMA.rules, MEGATRON, LLAMA.sizes_of(FACTS))


def test_round_trip(there: tuple[Checkpoint, Values], tmp_path: Path) -> None:
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


def test_missing_tensors_are_reported(there: tuple[Checkpoint, Values]) -> None:
    wanted = {**MEGATRON, "decoder.layers.self_attention.linear_qkv.bias": (LAYERS, 16), "other": (3,)}
    view = translated(there[0], LLAMA.rules, wanted, LLAMA.sizes_of(FACTS))
    assert view.translation.unmatched == ["other"]
    assert view.translation.without["decoder.layers.self_attention.linear_qkv.bias"][0].endswith("k_proj.bias")
    assert view.info("other", "master") is None
    assert translate(LLAMA.rules, {}, HF, {}).unused == list(HF)
