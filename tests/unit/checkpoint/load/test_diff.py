"""What differs between two checkpoints, and models that leave for elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.llama import FACTS, HF, LLAMA, MEGATRON, saved, values_of
from unickpt.base.errors import LanguageError, MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import differences
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.huggingface.writer import export
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.dialects.translated_checkpoint import translated
from unickpt.transform.dialects.translation import counterpart_shapes

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def test_equal_checkpoints_have_no_differences(tmp_path: Path) -> None:
    one, other = (saved(tmp_path / name, values_of(HF), aliases={}) for name in "ab")
    found = list(differences(one, other))
    assert len(found) == 3 * len(HF)
    assert all(each.equal for each in found)


def test_differences_are_counted_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert found["model.embed_tokens.weight", "exp_avg"]["reason"] == "only in the first"
    assert sum(bool(each["elements"] or each["reason"]) for each in found.values()) == 4
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
        wrong = [each["name"] for each in found if each["elements"] or each["reason"]]
        assert wrong == [{"a": NORM, "b": "decoder.final_layernorm.weight"}[arguments[0]]]
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "b"), "--dialect", "nothing"]) == 0  # of one dialect


def test_tensors_of_the_other_dialect_are_listed() -> None:
    sizes = {**LLAMA.sizes_of(FACTS), "vocab": HF["model.embed_tokens.weight"][0]}
    assert counterpart_shapes(LLAMA.rules, MEGATRON, sizes, outward=True) == {
        **HF,
        "lm_head.weight": HF["model.embed_tokens.weight"],
    }
    one_by_one = counterpart_shapes(LLAMA.rules, HF, sizes)
    assert one_by_one["decoder.layers.1.mlp.linear_fc1.weight"] == MEGATRON["decoder.layers.mlp.linear_fc1.weight"][1:]
    del sizes["vocab"]
    with pytest.raises(LanguageError, match="the size of the padding is unknown"):
        counterpart_shapes(LLAMA.rules, MEGATRON, sizes, outward=True)
    assert torch.Size(one_by_one["embedding.word_embeddings.weight"]) == torch.Size(HF["model.embed_tokens.weight"])


# ---------------------------------------------------------------- models of transformers


def folder_of(checkpoint: Path, to: Path, *more: str) -> Path:
    assert main(["export", str(checkpoint), str(to), *more]) == 0
    (to / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
                                                "hidden_size": 8, "vocab_size": 7, "num_hidden_layers": 2}))  # fmt: skip
    return to


def test_out_and_in_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(HF)
    saved(tmp_path / "a", values, aliases={"lm_head.weight": "model.embed_tokens.weight"})
    folder = folder_of(tmp_path / "a", tmp_path / "model", "--shard-gigabytes", "1e-6")
    assert len(list(folder.glob("*.safetensors"))) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(HF)
    assert "tied, left to transformers: lm_head.weight" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 0
    assert main(["verify", str(tmp_path / "b")]) == 0
    found = Checkpoint.open(tmp_path / "b")
    assert all(torch.equal(found.read_tensor(name, "weight"), values[name, "weight"]) for name in HF)
    assert found.manifest.writer.model == {"family": "llama", "facts": {**FACTS, "vocab": 7}}
    assert not (tmp_path / "b" / "rows").exists()
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 2  # it is there


def test_in_another_type(tmp_path: Path) -> None:
    values = values_of(HF)
    saved(tmp_path / "a", values, aliases={})
    folder = folder_of(tmp_path / "a", tmp_path / "model", "--dtype", "float32")
    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], values[name, "weight"].float()) for name in HF)


def test_an_interrupted_conversion_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a", values_of(HF), aliases={})
    folder = folder_of(tmp_path / "a", tmp_path / "model", "--shard-gigabytes", "1e-6")
    read, files = OpenFiles.read_into, sorted(folder.glob("*.safetensors"))

    def until_the_last(self: OpenFiles, path: Path, *more: Any) -> None:
        if path == files[-1]:
            raise OSError("the disk is gone")
        read(self, path, *more)

    monkeypatch.setattr(OpenFiles, "read_into", until_the_last)
    assert main(["convert", str(folder), str(tmp_path / "b"), "--workers", "1"]) == 2
    assert not is_checkpoint(tmp_path / "b")
    monkeypatch.setattr(OpenFiles, "read_into", read)
    os.utime(files[0])  # changed meanwhile, for all one knows
    capsys.readouterr()
    assert main(["convert", str(folder), str(tmp_path / "b")]) == 0
    assert f"in {len(files)} files, {len(files) - 2} of them written by an earlier run" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "b")]) == 0


def test_an_empty_tensor_is_kept(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "none": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    assert main(["convert", str(tmp_path), str(tmp_path / "b")]) == 0
    assert Checkpoint.open(tmp_path / "b").read_tensor("none", "weight").shape == (0, 3)


def test_files_that_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "b")]) == 2
    assert "contains no checkpoint that can be converted" in capsys.readouterr().err
    for name in "ab":
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert main(["convert", str(tmp_path), str(tmp_path / "c")]) == 2
    assert "model-00002-of-00002.safetensors is missing" in capsys.readouterr().err
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert main(["convert", str(tmp_path), str(tmp_path / "c")]) == 2
    assert "tensor w is in both a.safetensors and b.safetensors" in capsys.readouterr().err
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 100)
    assert main(["convert", str(tmp_path), str(tmp_path / "c")]) == 2
    assert not (tmp_path / "c").exists()


def test_half_a_model_is_not_exported(tmp_path: Path) -> None:
    found = saved(tmp_path / "a", values_of(HF), aliases={})
    half = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, excluded=("frozen.weight",)))
    with pytest.raises(MismatchError, match=r"was saved without frozen\.weight"):
        export(half, tmp_path / "model")


def test_a_folder_with_a_model_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "a", values_of(HF), aliases={})
    folder = folder_of(tmp_path / "a", tmp_path / "model")
    assert main(["export", str(tmp_path / "a"), str(folder)]) == 2
    assert "already contains a model (model.safetensors)" in capsys.readouterr().err
