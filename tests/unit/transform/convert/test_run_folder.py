"""``unickpt convert`` of folders from which Trainer, Accelerate and Lightning resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.source_folders import deepspeed
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.run_folder import run_folder, suggested


def trainer(folder: Path, step: int = 3) -> Path:
    """Return a ``checkpoint-N`` of Trainer with DeepSpeed's own checkpoint."""
    deepspeed(folder / f"global_step{step}")
    (folder / "latest").write_text(f"global_step{step}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in (
        "rng_state_0.pth",
        "training_args.bin",
        "config.json",
        "zero_to_fp32.py",
        "adapters/second/adapter_config.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_trainer_becomes_one_with_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, new = trainer(tmp_path / "out" / "checkpoint-3"), tmp_path / "new" / "checkpoint-3"
    deepspeed(source / "global_step2")
    assert main(["convert", str(source), str(new)]) == 0
    assert Checkpoint.open(new / "global_step3").manifest.step == 3
    copied = {name: data for name, data in files_of(new).items() if not name.startswith("global_step")}
    expected = {name: data for name, data in files_of(source).items() if not name.startswith("global_step")}
    del expected["zero_to_fp32.py"]
    assert copied == expected
    out = capsys.readouterr().out
    assert "left out: global_step2: 'latest' does not name it" in out
    assert "left out: zero_to_fp32.py: it cannot read the new checkpoint" in out
    assert main(["latest", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.strip() == str(new)


def test_all_models_of_accelerate_are_converted(tmp_path: Path) -> None:
    source, new = tmp_path / "state", tmp_path / "new"
    for name in ("pytorch_model", "pytorch_model_1"):
        deepspeed(source / name)
    (source / "latest").write_text("pytorch_model_1")
    (source / "random_states_0.pkl").write_bytes(b"states")
    assert main(["convert", str(source), str(new)]) == 0
    assert is_checkpoint(new / "pytorch_model")
    assert is_checkpoint(new / "pytorch_model_1")
    assert (new / "random_states_0.pkl").read_bytes() == b"states"
    assert (new / "latest").read_text() == "pytorch_model_1"


def test_a_folder_of_lightning_keeps_the_name_of_the_checkpoint(tmp_path: Path) -> None:
    source, new = tmp_path / "epoch=0.ckpt", tmp_path / "new.ckpt"
    deepspeed(source / "checkpoint")
    (source / "latest").write_text("checkpoint")
    assert main(["convert", str(source), str(new)]) == 0
    assert is_checkpoint(new / "checkpoint")
    assert (new / "latest").read_text() == "checkpoint"


def test_an_interrupted_conversion_is_no_checkpoint_and_goes_on(tmp_path: Path) -> None:
    source, new = trainer(tmp_path / "checkpoint-3"), tmp_path / "new"
    assert main(["convert", str(source), str(new)]) == 0
    (new / "global_step3" / "manifest.json").unlink()  # it is written last
    (new / "trainer_state.json").write_text("")
    assert main(["latest", str(new)]) == 1
    assert main(["convert", str(source), str(new)]) == 0
    assert is_checkpoint(new / "global_step3")
    assert json.loads((new / "trainer_state.json").read_text()) == {"global_step": 3}


def test_a_result_is_not_overwritten_and_not_put_into_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, new = trainer(tmp_path / "out" / "checkpoint-3"), tmp_path / "new"
    assert main(["convert", str(source), str(new)]) == 0
    assert main(["convert", str(source), str(new)]) == 2
    assert "holds a checkpoint already" in capsys.readouterr().err
    before = files_of(tmp_path)
    for place in (source, source / "inside", tmp_path / "out"):
        assert main(["convert", str(source), str(place)]) == 2
        assert "must be apart from" in capsys.readouterr().err
    assert files_of(tmp_path) == before


def test_a_source_that_cannot_be_read_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, new = trainer(tmp_path / "checkpoint-3"), tmp_path / "new"
    (source / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
    assert main(["convert", str(source), str(new)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not new.exists()


def test_a_save_directory_of_the_engine_becomes_one_checkpoint(tmp_path: Path) -> None:
    deepspeed(tmp_path / "run" / "global_step3")
    (tmp_path / "run" / "latest").write_text("global_step3")
    assert run_folder(tmp_path / "run") is None
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "new")]) == 0
    assert is_checkpoint(tmp_path / "new")


def test_the_suggested_place_is_none_of_the_programs_checkpoints(tmp_path: Path) -> None:
    """Trainer counts and deletes ``checkpoint-*``, Accelerate everything in its folder ``checkpoints``."""
    found = suggested(trainer(tmp_path / "out" / "checkpoint-3"), "global_step3", is_done=is_checkpoint)
    assert (found.directory, found.program, found.done) == (tmp_path / "out" / "converted" / "checkpoint-3", "Trainer", False)
    state = tmp_path / "project" / "checkpoints" / "checkpoint_0"
    deepspeed(state / "pytorch_model")
    found = suggested(state, "pytorch_model", is_done=is_checkpoint)
    assert found.directory == tmp_path / "project" / "converted" / "checkpoint_0"
    deepspeed(tmp_path / "run" / "first")
    found = suggested(tmp_path / "run", "first", is_done=is_checkpoint)
    assert (found.source, found.directory) == (tmp_path / "run" / "first", tmp_path / "run" / "converted" / "first")
