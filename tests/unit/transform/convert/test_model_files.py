"""A checkpoint keeps configuration and tokenizer of the model that it was made of, and passes them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.cli import json_of
from unickpt.checkpoint.checkpoint_folder import kept_of_model
from unickpt.checkpoint.save.retention import remove
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.main import main

CONFIG = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
KEPT = [
    "model/additional_chat_templates/tool.jinja", "model/chat_template.jinja", "model/config.json",
    "model/generation_config.json", "model/tokenizer.json", "model/tokenizer_config.json",
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "additional_chat_templates").mkdir(parents=True)
    tensors = {"model.embed_tokens.weight": (torch.arange(32.0) / 7).view(8, 4), "model.norm.weight": torch.ones(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in (*KEPT, "model/modeling_own.py", "model/README.md", "model/trainer_state.json"):
        (folder / name.removeprefix("model/")).write_text("{}")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def kept(checkpoint: Path) -> list[str]:
    return sorted(kept_of_model(open_storage(str(checkpoint))))


def configuration(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "model/config.json").read_text())


def test_convert_edit_and_average_keep_the_files(source: Path, tmp_path: Path) -> None:
    base, cast, mean = tmp_path / "base", tmp_path / "cast", tmp_path / "mean"
    assert sorted(json_of("convert", str(source), str(base))["checkpoints"][0]["model_files"]) == KEPT
    json_of("edit", str(base), str(cast), "--cast", "*norm*=bfloat16")
    json_of("edit", str(base), str(tmp_path / "other"), "--cast", "*embed*=bfloat16", "--cast", "*embed*=float32")
    json_of("average", str(mean), str(base), str(tmp_path / "other"))
    for checkpoint in (base, cast, mean):
        assert kept(checkpoint) == KEPT, checkpoint
        assert configuration(checkpoint) == CONFIG
        assert (checkpoint / "model/tokenizer.json").read_text() == "{}"
    assert json_of("verify", str(base))["sound"]
    assert sorted(json_of("inspect", str(base))["checkpoint"]["model_files"]) == KEPT


def test_an_export_takes_what_the_checkpoint_keeps(source: Path, tmp_path: Path) -> None:
    json_of("convert", str(source), str(tmp_path / "base"))
    exported = json_of("export", str(tmp_path / "base"), str(tmp_path / "hf"))
    assert sorted(exported["copied"]) == [name.removeprefix("model/") for name in KEPT]
    assert not exported["without_config"]


@pytest.mark.parametrize("place", ["step/actor/dist_ckpt/huggingface", "step/actor/huggingface"])
def test_an_export_takes_what_libraries_keep_in_a_folder_of_their_own(source: Path, tmp_path: Path, place: str) -> None:
    checkpoint, config = tmp_path / "step/actor/dist_ckpt", tmp_path / place / "config.json"
    (source / "config.json").unlink()
    checkpoint.parent.mkdir(parents=True)
    json_of("convert", str(source), str(checkpoint))
    assert json_of("export", str(checkpoint), str(tmp_path / "without"))["without_config"]
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    assert json_of("export", str(checkpoint), str(tmp_path / "hf"))["copied"] == ["config.json"]


def test_the_configuration_gets_the_new_size_of_the_vocabulary(source: Path, tmp_path: Path) -> None:
    json_of("convert", str(source), str(tmp_path / "base"))
    found = json_of("edit", str(tmp_path / "base"), str(tmp_path / "padded"), "--pad-vocabulary-to", "16")
    assert found["left_out"] == []
    assert configuration(tmp_path / "padded") == {**CONFIG, "vocab_size": 16}
    assert configuration(tmp_path / "base") == CONFIG


def test_a_configuration_that_describes_other_weights_is_left_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_of("convert", str(source), str(tmp_path / "base"))
    assert main(["edit", str(tmp_path / "base"), str(tmp_path / "new"), "--rename", "model.norm.*=model.last.*"]) == 0
    assert "left out: config.json of the model: these steps change names or shapes" in capsys.readouterr().out
    assert kept(tmp_path / "new") == [name for name in KEPT if name != "model/config.json"]


def test_retention_removes_the_files_and_no_others(source: Path, tmp_path: Path) -> None:
    json_of("convert", str(source), str(tmp_path / "runs/a"))
    json_of("convert", str(source), str(tmp_path / "runs/b"))
    (tmp_path / "runs/b/model/notes.md").write_text("a user's own")
    for name in ("a", "b"):
        remove(open_storage(str(tmp_path / "runs" / name)))
    left = [path.relative_to(tmp_path / "runs") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert left == [Path("b/model/notes.md")]


def test_a_link_out_of_the_folder_is_left_out_and_one_of_the_cache_is_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text("private")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "private.json")
    made = json_of("convert", str(source), str(tmp_path / "base"))["checkpoints"][0]
    assert "model/tokenizer.json" not in kept(tmp_path / "base")
    assert "tokenizer.json: leads to" in made["left_out"][0]
    cached = tmp_path / "hub/snapshots/0123"
    cached.parent.mkdir(parents=True)
    source.rename(cached)
    (tmp_path / "hub/blobs").mkdir()
    (cached / "config.json").rename(tmp_path / "hub/blobs/4567")
    (cached / "config.json").symlink_to("../../blobs/4567")
    json_of("convert", str(cached), str(tmp_path / "cached"))
    assert configuration(tmp_path / "cached") == CONFIG


def test_a_model_in_the_place_of_the_files_is_not_touched(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base/model").mkdir(parents=True)
    (tmp_path / "base/model/model.safetensors").write_text("a user's own")
    assert main(["convert", str(source), str(tmp_path / "base")]) == 2
    assert "base/model: contains a model" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "base").rglob("*")] == ["model", "model.safetensors"]
