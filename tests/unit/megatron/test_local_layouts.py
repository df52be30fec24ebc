"""Notes on the layouts of local checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_unickpt.pretraining.local_layouts import KEPT, note, other_layout, set_aside

TP2, DP2 = {"tensor": 2, "world_size": 2}, {"tensor": 1, "world_size": 2}


def test_another_layout_is_told_from_the_same_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "local")
    note(folder, 0, 3, TP2)
    note(folder, 0, 4, DP2)
    assert other_layout(folder, 0, 3, TP2) is None
    assert other_layout(folder, 0, 3, DP2) == TP2
    assert other_layout(folder, 0, 4, TP2) == DP2


def test_without_a_note_there_is_no_other_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert other_layout(folder, 0, 3, TP2) is None
    note(folder, 0, 3, TP2)
    assert other_layout(folder, 1, 3, DP2) is None
    (tmp_path / "unickpt_layouts_0.json").write_text("torn")
    assert other_layout(folder, 0, 3, DP2) is None


def test_the_newest_notes_are_kept(tmp_path: Path) -> None:
    for iteration in range(1, 2 * KEPT + 1):
        note(str(tmp_path), 0, iteration, TP2)
    assert other_layout(str(tmp_path), 0, KEPT, DP2) is None
    assert other_layout(str(tmp_path), 0, KEPT + 1, DP2) == TP2


def test_a_folder_that_cannot_be_written_is_left_to_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    note(str(tmp_path / "file"), 0, 3, TP2)
    assert other_layout(str(tmp_path / "file"), 0, 3, DP2) is None


def test_checkpoints_of_another_layout_are_moved_and_replace_the_ones_there(tmp_path: Path) -> None:
    (tmp_path / "other_layout").mkdir()
    for name in ("iter_0000004_0_local.pt", "other_layout/iter_0000002_0_local.pt"):
        (tmp_path / name).touch()
    manager = Namespace(local_ckpt_dir=tmp_path, latest_iteration=4)
    set_aside(manager)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("iter*")] == ["other_layout/iter_0000004_0_local.pt"]
    assert manager.latest_iteration == -1
