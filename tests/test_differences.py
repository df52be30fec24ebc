"""What differs between two checkpoints, and models that leave for elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.test_translated import FACTS, HF, LLAMA, MEGATRON, saved, values_of
from unickpt.cli.main import main
from unickpt.differences import differences
from unickpt.language.translation import listed
from unickpt.translated import translated

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def test_equal_checkpoints_have_no_differences(tmp_path: Path) -> None:
    one, other = (saved(tmp_path / name, values_of(HF), aliases={}) for name in "ab")
    found = list(differences(one, other))
    assert len(found) == 3 * len(HF)
    assert all(each.equal for each in found)


def test_what_differs_is_counted_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(HF)
    saved(tmp_path / "a", values, aliases={})
    changed = dict(values)
    changed[Q, "exp_avg"] = values[Q, "exp_avg"].clone()
    changed[Q, "exp_avg"][0, :2] *= 2
    changed[NORM, "master"] = values[NORM, "master"].clone()
    changed[NORM, "master"][3] = math.nan
    del changed["model.embed_tokens.weight", "exp_avg"]
    saved(tmp_path / "b", changed, aliases={})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    found = {(each["name"], each["state"]): each for each in json.loads(capsys.readouterr().out)["tensors"]}
    moments = found[Q, "exp_avg"]
    assert (moments["elements"], moments["relative"]) == (2, 0.5)
    assert moments["largest"] == pytest.approx(float(values[Q, "exp_avg"][0, 1]))
    assert found[NORM, "master"]["elements"] == 1
    assert math.isnan(found[NORM, "master"]["largest"])
    assert found[NORM, "weight"]["elements"] == 1  # the cast of it
    assert found["model.embed_tokens.weight", "exp_avg"]["told"] == "only in the first"
    assert sum(bool(each["elements"] or each["told"]) for each in found.values()) == 4
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "4 of 60 tensors differ" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_checkpoints_of_two_dialects_are_compared_under_the_names_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"family": "llama", "facts": FACTS}
    values = values_of(HF)
    one = saved(tmp_path / "a", values, aliases={"lm_head.weight": "model.embed_tokens.weight"}, model=model)
    tied = {name: shape for name, shape in MEGATRON.items() if name != "output_layer.weight"}
    view = translated(one, LLAMA.rules, tied, LLAMA.sizes_of(FACTS))
    as_megatron = {info.key: view.read_tensor(*info.key) for info in view.index.tensors}
    as_megatron["decoder.final_layernorm.weight", "exp_avg"] += 1
    saved(tmp_path / "b", as_megatron, aliases={}, dialect="megatron-core")
    for arguments in (["a", "b"], ["b", "a"]):
        assert main(["diff", *(str(tmp_path / name) for name in arguments), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["tensors"]
        wrong = [each["name"] for each in found if each["elements"] or each["told"]]
        assert wrong == [{"a": NORM, "b": "decoder.final_layernorm.weight"}[arguments[0]]]
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "b"), "--dialect", "nothing"]) == 0  # of one dialect


def test_tensors_of_the_other_dialect_are_listed() -> None:
    sizes = {**LLAMA.sizes_of(FACTS), "vocab": HF["model.embed_tokens.weight"][0]}
    assert listed(LLAMA.rules, MEGATRON, sizes, outward=True) == {**HF, "lm_head.weight": HF["model.embed_tokens.weight"]}
    one_by_one = listed(LLAMA.rules, HF, sizes)
    assert one_by_one["decoder.layers.1.mlp.linear_fc1.weight"] == MEGATRON["decoder.layers.mlp.linear_fc1.weight"][1:]
    del sizes["vocab"]
    assert listed(LLAMA.rules, MEGATRON, sizes, outward=True)["lm_head.weight"] == MEGATRON["output_layer.weight"]
    assert torch.Size(one_by_one["embedding.word_embeddings.weight"]) == torch.Size(HF["model.embed_tokens.weight"])
