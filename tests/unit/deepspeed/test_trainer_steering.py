"""What a Trainer run resumes from after a restart, and what it warns about. Handmade folders, no training."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt.batch import steered
from ds_unickpt.trainer import trainer_steering
from tests.support.trainer_folders import made
from unickpt.base.errors import CorruptCheckpointError
from unickpt.base.options.job import Options


@pytest.mark.parametrize(
    ("round_", "option", "expected"),
    [
        ("", "steering", False),
        ("1.1", "steering", False),
        ("1.2", "steering", True),
        ("3.12", "steering", True),
        ("odd", "steering", False),
        ("1.2", "never", False),
        ("", "always", True),
    ],
)
def test_a_run_resumes_by_itself_after_a_restart(
    round_: str, option: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(steered.ROUND, round_)
    assert trainer_steering.resumes(Options(auto_resume=option)) is expected


@pytest.mark.parametrize(
    ("round_", "option", "expected"),
    [("", "steering", False), ("1.1", "steering", True), ("", "always", True), ("1.1", "never", False)],
)
def test_the_batch_is_kept_in_all_rounds(round_: str, option: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(steered.ROUND, round_)
    assert steered.keeps_batch(Options(keep_global_batch=option)) is expected


def test_a_run_without_checkpoints_starts(tmp_path: Path) -> None:
    assert trainer_steering.newest(str(tmp_path / "missing"), fall_back=True).folder is None
    assert trainer_steering.newest(str(tmp_path), fall_back=True).folder is None


def test_a_damaged_checkpoint_is_passed_over_only_if_that_is_allowed(tmp_path: Path) -> None:
    made(tmp_path, 5, 10)
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert trainer_steering.newest(str(tmp_path), fall_back=True).folder == str(tmp_path / "checkpoint-5")
    assert trainer_steering.newest(str(tmp_path), fall_back=False).folder == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="No checkpoint is left to resume from"):
        trainer_steering.newest(str(tmp_path), fall_back=True)


def test_a_first_round_in_the_folder_of_an_earlier_run_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(steered.ROUND, "1.1")
    assert trainer_steering.remark(Options(), None, str(made(tmp_path / "empty"))) == ""
    made(tmp_path, 5)
    text = trainer_steering.remark(Options(), None, str(tmp_path))
    assert text.startswith(f"{tmp_path / 'checkpoint-5'} is from an earlier run and is not loaded. After a restart")
    assert trainer_steering.remark(Options(auto_resume="never"), None, str(tmp_path)) == ""
    assert trainer_steering.remark(Options(), True, str(tmp_path)) == ""
    monkeypatch.delenv(steered.ROUND)
    assert trainer_steering.remark(Options(), None, str(tmp_path)) == ""


def test_a_named_checkpoint_that_is_loaded_again_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = str(made(tmp_path, 5, 10) / "checkpoint-5")
    monkeypatch.setenv(steered.ROUND, "1.1")
    assert trainer_steering.remark(Options(), named, str(tmp_path)) == ""
    monkeypatch.setenv(steered.ROUND, "1.2")
    text = trainer_steering.remark(Options(), named, str(tmp_path))
    assert text.startswith(f"resume_from_checkpoint={named} is loaded again after the restart, although")
    assert trainer_steering.remark(Options(), f"{tmp_path}/checkpoint-10/", str(tmp_path)) == ""


def test_true_on_a_command_line_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trainer_steering.meant("True") is True
    assert trainer_steering.meant("False") is None
    for given in (None, True, False, "out/checkpoint-5", ""):
        assert trainer_steering.meant(given) is given
    (tmp_path / "True").mkdir()
    assert trainer_steering.meant("True") == "True"
