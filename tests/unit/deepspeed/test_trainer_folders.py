"""Selection of the ``checkpoint-N`` folder of a Trainer run: handmade folders with checkpoints of the real saver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt.loops import trainer_folders
from ds_unickpt.loops.trainer_folders import choose, note_damage, unusable
from tests.support.trainer_folders import made
from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.witnessed import WitnessFault
from unickpt.checkpoint.witness_faults import add_fault


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def newer(place: Path) -> None:
    path = place / "global_step10" / "manifest.json"
    body = {**json.loads(path.read_text()), "version": 99}
    path.write_text(json.dumps({**body, "checksum": digest(manifest_module._canonical(body))}))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "killed while Trainer wrote its state": (lambda d: cut(d / "trainer_state.json"), "trainer_state.json is damaged"),
    "killed before": (lambda d: (d / "trainer_state.json").unlink(), "no trainer_state.json"),
    "killed while a generator was written": (lambda d: cut(d / "rng_state_0.pth"), "rng_state_0.pth is incomplete"),
    "killed before the commit": (lambda d: (d / "global_step10/manifest.json").unlink(), "no manifest.json"),
    "killed before latest": (lambda d: (d / "latest").unlink(), "no 'latest' file"),
    "no checkpoint inside": (lambda d: shutil.rmtree(d / "global_step10"), r"no DeepSpeed checkpoint \(global_step\*\)"),
    "a file is missing": (lambda d: next((d / "global_step10/data").iterdir()).unlink(), "is missing"),
    "a file is cut": (lambda d: cut(next((d / "global_step10/data").iterdir())), "bytes, expected"),
    "the index is damaged": (
        lambda d: (d / "global_step10/index.safetensors").write_bytes(
            bytes((d / "global_step10/index.safetensors").stat().st_size)
        ),
        "the index is damaged",
    ),
    "the witness has found a fault": (
        lambda d: add_fault(d, WitnessFault(0, 10, "SDC_COMPUTE")),
        "may have traces of a fault after step 0: SDC_COMPUTE",
    ),
    "damage found while reading": (lambda d: note_damage(str(d), "rank 1: a checksum"), "found damaged before: rank 1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_complete_folder_is_selected(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    made(tmp_path, 2, 9, 10)
    assert choose(tmp_path).folder == str(tmp_path / "checkpoint-10")
    assert choose(tmp_path).line() == ""
    damage(tmp_path / "checkpoint-10")
    chosen = choose(tmp_path)
    assert chosen.folder == str(tmp_path / "checkpoint-9")
    with pytest.raises(
        AssertionError, match=f"checkpoint-10 cannot be resumed: .*{reason}.* Resuming from .*checkpoint-9 inst"
    ):
        raise AssertionError(chosen.line())
    assert trainer_folders.advice(str(tmp_path / "checkpoint-10")).startswith(f"{tmp_path / 'checkpoint-9'} can be resumed")


def test_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    made(tmp_path, 9, 10)
    newer(tmp_path / "checkpoint-10")
    assert choose(tmp_path).folder == str(tmp_path / "checkpoint-10")


def test_a_run_without_any_complete_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    made(tmp_path, 10)
    (tmp_path / "checkpoint-10/trainer_state.json").unlink()
    (tmp_path / "checkpoint-10/global_step10/manifest.json").unlink()
    chosen = choose(tmp_path)
    assert chosen.folder is None
    assert "No checkpoint is left to resume from" in chosen.line()
    assert choose(tmp_path / "checkpoint-10").folder is None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    made(tmp_path, 9, 10)
    for step in (9, 10):
        next((tmp_path / f"checkpoint-{step}/global_step{step}/data").iterdir()).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-10 cannot be resumed.*checkpoint-9 cannot be resumed"):
        choose(tmp_path)


def test_folders_without_our_checkpoints_are_left_to_trainer(tmp_path: Path) -> None:
    made(tmp_path, 9, 10)
    shutil.rmtree(tmp_path / "checkpoint-10/global_step10")
    (tmp_path / "checkpoint-10/global_step10").mkdir()
    (tmp_path / "checkpoint-10/global_step10/mp_rank_00_model_states.pt").touch()
    assert unusable(str(tmp_path / "checkpoint-10")) == ""
    for step in (9, 10):
        shutil.rmtree(tmp_path / f"checkpoint-{step}/global_step{step}")
    assert choose(tmp_path).folder == str(tmp_path / "checkpoint-10"), "save_only_model"


def test_a_note_of_damage_ends_with_the_next_save(tmp_path: Path) -> None:
    made(tmp_path, 9, 10)
    assert note_damage(str(tmp_path / "checkpoint-10"), "a checksum")
    made(tmp_path, 10)
    assert choose(tmp_path).folder == str(tmp_path / "checkpoint-10")
    note_damage(str(tmp_path / "checkpoint-10"), "a checksum")
    trainer_folders.forget_damage(str(tmp_path / "checkpoint-10"))
    assert choose(tmp_path).folder == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (1, None, []),
        (2, None, [40]),
        (3, None, [40, 30]),
        (1, 20, [20]),
        (2, 20, [20]),
        (3, 20, [40, 20]),
        (1, 50, []),
        (1, 99, [40]),
        (0, None, [40, 30, 20]),
    ],
)
def test_the_folders_that_trainers_rotation_keeps(tmp_path: Path, limit: int, best: int | None, left: list[int]) -> None:
    """Compare with the function of transformers."""
    from transformers.trainer_utils import rotate_checkpoints

    for step in (20, 30, 40, 50):
        (tmp_path / f"checkpoint-{step}").mkdir()
    chosen = None if best is None else str(tmp_path / f"checkpoint-{best}")
    found = trainer_folders.left_by_rotation(str(tmp_path / "checkpoint-50"), limit, chosen)
    assert found == [str(tmp_path / f"checkpoint-{step}") for step in left]
    rotate_checkpoints(str(tmp_path), limit, chosen)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-50", *(Path(path).name for path in found)}
