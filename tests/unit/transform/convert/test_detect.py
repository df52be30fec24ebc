"""Format detection of ``unickpt convert``: unickpt checkpoints, folders with several formats, parts of a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import handmade
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.cli.main import main


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return handmade.save_single(tmp_path / "run")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Convert a folder, which must fail with one line and write nothing. Returns the line."""

    def call(source: Path) -> str:
        target = tmp_path / "converted"
        assert main(["convert", str(source), str(target)]) == 2
        assert not target.exists()
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        return captured.err

    return call


def model(folder: Path, name: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"w": torch.ones(2)}, folder / name)
    return folder


def trainer(folder: Path, step: int = 3, **options: Any) -> Path:
    """Return a ``checkpoint-N`` of Trainer: model weights, Trainer's state, and a save directory of unickpt."""
    handmade.save_single(model(folder), f"global_step{step}", step=step, **options)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_checkpoint_of_unickpt_is_not_converted(ours: Path, refused: Any) -> None:
    for source in (ours, ours.parent):  # 'latest' leads to it
        err = refused(source)
        assert "is already a unickpt checkpoint" in err
        assert "cp -r" in err
        assert "unickpt export" in err


def test_a_trainer_folder_with_a_checkpoint_of_unickpt_is_not_converted(tmp_path: Path, refused: Any) -> None:
    folder = trainer(tmp_path / "out" / "checkpoint-3")
    assert f"{folder / 'global_step3'}: is already a unickpt checkpoint" in refused(folder)
    (folder / "latest").unlink()
    err = refused(folder)
    assert "contains a transformers model and the checkpoint global_step3 (unickpt)" in err
    assert f"{folder / 'model.safetensors'} for the weights of the model only" in err
    shutil.rmtree(folder / "global_step3")
    (folder / "latest").write_text("global_step3")
    assert "latest names 'global_step3', which does not exist" in refused(folder)


def test_the_weights_of_a_trainer_folder_can_be_selected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trainer(tmp_path / "out" / "checkpoint-3")
    assert main(["convert", str(folder / "model.safetensors"), str(tmp_path / "made")]) == 0
    assert [info.key for info in Checkpoint.open(tmp_path / "made").index.tensors] == [("w", "weight")]


def test_the_output_folder_of_a_trainer_run_names_its_checkpoints(tmp_path: Path, refused: Any) -> None:
    for step in (3, 6):
        trainer(tmp_path / "out" / f"checkpoint-{step}", step)
    assert "contains unickpt checkpoints (checkpoint-3 (unickpt), checkpoint-6 (unickpt))" in refused(tmp_path / "out")


def test_a_final_model_beside_checkpoints_is_converted_and_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(model(tmp_path / "out") / "checkpoint-3")
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "made")]) == 0
    assert "left out: checkpoint-3 (unickpt)" in capsys.readouterr().out


def test_parts_of_a_checkpoint_of_unickpt_are_no_model(ours: Path, refused: Any) -> None:
    assert "rank00000.safetensors is a part of a unickpt checkpoint" in refused(ours / "data")
    (ours / "manifest.json").unlink()
    assert "its save did not finish" in refused(ours)
    shutil.rmtree(ours / "data")
    assert "index.safetensors is a part of a unickpt checkpoint" in refused(ours)


def test_of_deepspeed_and_unickpt_in_one_folder_the_one_that_saved_last_is_read(ours: Path, refused: Any) -> None:
    """As a job loads it."""
    of_deepspeed = ours / "mp_rank_00_model_states.pt"
    of_deepspeed.write_bytes(b"not a pickle")
    assert "mp_rank_00_model_states.pt" in refused(ours)
    os.utime(of_deepspeed, (0, 0))
    assert "is already a unickpt checkpoint" in refused(ours)


def test_a_manifest_of_another_program_is_no_obstacle(tmp_path: Path) -> None:
    folder = model(tmp_path / "hf")
    (folder / "manifest.json").write_text(json.dumps({"format": "something else"}))
    assert main(["convert", str(folder), str(tmp_path / "made")]) == 0


def test_files_beside_the_model_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path / "hf")
    model(folder, "adapter_model.safetensors", a=torch.ones(1))
    model(folder, "consolidated.safetensors", w=torch.ones(2))
    assert main(["convert", str(folder), str(tmp_path / "made")]) == 0
    out = capsys.readouterr().out
    assert "left out: adapter_model.safetensors" in out
    assert "left out: consolidated.safetensors" in out
    assert [info.name for info in Checkpoint.open(tmp_path / "made").index.tensors] == ["w"]


def test_an_unknown_folder_is_an_error(tmp_path: Path, refused: Any) -> None:
    assert "no such directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file; pass the folder that contains it" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "expected one of: *.safetensors of transformers" in refused(tmp_path / "empty")


def test_errors_of_other_commands_name_convert(tmp_path: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = model(tmp_path / "hf")
    for arguments in (["diff", ours, foreign], ["diff", foreign, ours], ["inspect", foreign], ["verify", foreign]):
        assert main([str(word) for word in arguments]) == 2
        err = capsys.readouterr().err
        assert f"{foreign}: is a checkpoint of transformers" in err
        assert f"unickpt convert {foreign} DIR" in err
    assert not is_checkpoint(foreign)
