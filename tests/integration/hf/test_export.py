"""One command exports a Trainer checkpoint as a model folder, and transformers computes the same logits from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import handmade
from tests.support.adapters import adapted, llama, saved
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model")
STATE = ("trainer_state.json", "training_args.bin", "rng_state.pth", "scheduler.pt", "optimizer.pt", "README.md")


def trainer_folder(folder: Path, model: Any, *, weights: bool = True) -> Path:
    """Return a ``checkpoint-5`` folder as Trainer writes it, with a checkpoint of the model."""
    model.save_pretrained(str(folder))
    if not weights:  # as without stage3_gather_16bit_weights_on_model_save
        (folder / "model.safetensors").unlink()
    saved(model, folder / "global_step5")
    (folder / "latest").write_text("global_step5")
    for name in (*TOKENIZER, *STATE, "modeling_own.py"):
        (folder / name).write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, message = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not any(message.values()), message
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [True, False], ids=["with-weights", "without-weights"])
def test_a_trainer_checkpoint_is_a_model_after_one_command(
    dtype: torch.dtype, weights: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama(dtype)
    folder = trainer_folder(tmp_path / "out" / "checkpoint-5", model, weights=weights)
    assert main(["export", str(folder), str(tmp_path / "hf")]) == 0
    assert "copied from" in capsys.readouterr().out
    expected = {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == expected
    model.save_pretrained(str(tmp_path / "reference"))
    assert torch.equal(logits(tmp_path / "hf"), logits(tmp_path / "reference"))
    (folder / "latest").unlink()  # means the only checkpoint in it
    assert main(["export", str(folder), str(tmp_path / "again"), "--with-code"]) == 0
    assert {path.name for path in (tmp_path / "again").iterdir()} == {*expected, "modeling_own.py"}


def test_a_named_folder_provides_only_the_files_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-5", llama(torch.float32))
    shutil.move(folder / "global_step5", tmp_path / "alone")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_own.Own"}}))
    assert main(["export", str(tmp_path / "alone"), str(tmp_path / "hf"), "--config", str(folder), "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "not copied, not part of a model: README.md, latest, modeling_own.py" in out
    assert "--with-code copies *.py" in out
    assert not {path.name for path in (tmp_path / "hf").iterdir()} & {*STATE, "latest", "modeling_own.py"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"  # as the weights


def test_a_config_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handmade.save_single(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"lr": 1}')
    saved(llama(torch.float32), tmp_path / "out" / "ck")
    assert main(["export", str(tmp_path / "out" / "ck"), str(tmp_path / "hf")]) == 0
    assert "there is no config.json yet" in capsys.readouterr().out


def test_adapters_are_not_exported_as_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted("plain")
    for frozen, name in ((True, "whole"), (False, "alone")):
        saved(model, tmp_path / name, frozen=frozen)
        assert main(["export", str(tmp_path / name), str(tmp_path / "hf")]) == 2
        err = capsys.readouterr().err
        assert "contains peft adapters" in err
        assert "--merge-lora --lora-config ADAPTER_FOLDER" in err
        assert ("--lora-base BASE" in err) == (not frozen)
        assert not (tmp_path / "hf").exists()


def test_an_export_that_failed_leaves_no_model_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-5", llama(torch.float32))
    read, calls = Checkpoint.read_box, []

    def until_the_tenth(self: Checkpoint, *more: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return read(self, *more, **options)

    arguments = ["export", str(folder), str(tmp_path / "hf"), "--shard-gigabytes", "1e-4"]
    monkeypatch.setattr(Checkpoint, "read_box", until_the_tenth)
    assert main(arguments) == 130
    assert [path.name for path in (tmp_path / "hf").iterdir()] == []
    monkeypatch.setattr(Checkpoint, "read_box", read)
    assert main(arguments) == 0
    assert logits(tmp_path / "hf").shape == (1, 12, 150)
