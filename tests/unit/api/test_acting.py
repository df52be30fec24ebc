"""What a verdict does to the folders of a job's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import handmade
from unickpt.api.acting import act
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault
from unickpt.checkpoint.witness_faults import FaultFolders, add_fault, read_faults
from unickpt.training.witness import words
from unickpt.training.witness.vote import Kind, Subject, Verdict

FOUND = Verdict(Kind.SDC_REPLICA, Kind.SDC_REPLICA, Subject("w", 9), (1,), ("b",), 2, ("b",))


def test_all_folders_go_back_to_the_last_step_that_one_of_them_knows_as_passed(tmp_path: Path) -> None:
    """A process that has gone on from a checkpoint has passed nothing by itself before its first check."""
    for name, until in (("often", 6), ("rarely", 4)):
        handmade.save_single(tmp_path / name, "s8", step=8, witness=Passed(until, ("rest",)))
    act(FOUND, 0, [str(tmp_path / "often"), str(tmp_path / "rarely")])
    for name in ("often", "rarely"):
        assert read_faults(tmp_path / name) == (WitnessFault(6, 9, words.text(FOUND)),)


def test_a_damaged_file_of_one_folder_leaves_the_other_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "witness.json").write_text("{")
    act(FOUND, 3, [str(tmp_path / "damaged"), str(tmp_path / "sound")])
    assert f"checkpoints in {tmp_path}/damaged are not marked as suspect" in caplog.text
    assert read_faults(tmp_path / "sound")[0].after == 3


def test_without_a_folder_nothing_is_marked_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    act(FOUND, 3, [])
    assert "no folder of checkpoints is known yet: none is marked as suspect" in caplog.text


def test_a_state_has_gone_back_from_the_faults_that_a_folder_had_at_first(tmp_path: Path) -> None:
    folders, place = FaultFolders(), str(tmp_path)
    add_fault(place, WitnessFault(1, 2, "a"))
    folders.loaded(place)
    add_fault(place, WitnessFault(3, 4, "b"))  # of this process
    assert folders.passed(place, 3, ("rest",)) == Passed(3, ("rest",), faults=1)
    assert folders.known() == [place]


def test_a_folder_that_was_only_loaded_from_does_not_count_after_a_save_into_another(tmp_path: Path) -> None:
    folders = FaultFolders()
    folders.loaded(str(tmp_path / "pretrained"))
    assert folders.known() == [str(tmp_path / "pretrained")]
    folders.note(str(tmp_path / "out"))
    folders.note(str(tmp_path / "best"))
    assert folders.known() == [str(tmp_path / "out"), str(tmp_path / "best")]
