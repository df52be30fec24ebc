"""Which checkpoint ``--load`` of Megatron's scripts means: its own folder, DeepSpeed's, or a checkpoint itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_unickpt.pretraining.choices import Choices
from tests.support.saves import saved
from unickpt.checkpoint.checkpoint_folder import TRACKER
from unickpt.checkpoint.format.witnessed import WitnessFault
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.witness_faults import add_fault


def order(folder: Path, step: int | None = None) -> list[str]:
    """Everything that is tried if all of it is damaged."""
    choices, found = Choices(str(folder), step), list[str]()
    while (choice := choices.next()).directory:
        found.append(str(Path(choice.directory).relative_to(folder)))
    return found


@pytest.fixture
def megatrons(tmp_path: Path) -> Path:
    saved(tmp_path, "iter_0000001", "iter_0000002", "iter_0000003")
    (tmp_path / "latest").unlink()
    (tmp_path / TRACKER).write_text("2")
    return tmp_path


@pytest.fixture
def deepspeeds(tmp_path: Path) -> Path:
    saved(tmp_path, "global_step1", "best", "global_step3")
    (tmp_path / "latest").write_text("best")
    return tmp_path


def test_the_order_in_a_folder_of_megatron(megatrons: Path) -> None:
    assert order(megatrons) == ["iter_0000002", "iter_0000003", "iter_0000001"]
    assert order(megatrons, 1) == ["iter_0000001"]
    assert order(megatrons, 9) == []
    assert (megatrons / TRACKER).read_text() == "2"


@pytest.mark.parametrize("content", ["", "9", "x", "²"])
def test_a_tracker_that_names_nothing_is_put_right(megatrons: Path, content: str) -> None:
    (megatrons / TRACKER).write_text(content)
    choice = Choices(str(megatrons), None).next()
    assert (choice.name, choice.step) == ("iter_0000003", 3)
    assert TRACKER in choice.notes[0]
    assert (megatrons / TRACKER).read_text() == ("9" if content == "9" else "3"), "another job may write the number"


def test_megatron_loads_its_own_formats(megatrons: Path) -> None:
    (megatrons / "iter_0000009").mkdir()
    (megatrons / "iter_0000009/common.pt").touch()
    (megatrons / TRACKER).write_text("9")
    assert order(megatrons) == []
    assert order(megatrons, 9) == []
    (megatrons / TRACKER).write_text("release")
    assert order(megatrons) == []
    assert order(megatrons / "nowhere") == order(megatrons / "nowhere", 3) == []


def test_deepspeeds_folder(deepspeeds: Path) -> None:
    choices = Choices(str(deepspeeds), None)
    assert choices.next() == Offer(str(deepspeeds / "best"), "best", 2)
    assert order(deepspeeds) == ["best", "global_step3", "global_step1"]
    assert order(deepspeeds, 3) == ["global_step3"]
    (deepspeeds / "latest").unlink()
    assert order(deepspeeds) == []


def test_a_step_that_several_checkpoints_have_is_no_choice(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    saved(tmp_path, "b")
    choice = Choices(str(tmp_path), 1).next()
    assert not choice.directory
    assert "several checkpoints of step 1: b, a" in choice.refused


def test_a_checkpoint_itself(deepspeeds: Path, megatrons: Path) -> None:
    for folder, name, step in ((deepspeeds, "best", 2), (megatrons, "iter_0000003", 3)):
        choices = Choices(str(folder / name), None)
        assert choices.next() == Offer(str(folder / name), step=step, explicit=True)
        assert choices.next() == Offer()


def test_deepspeeds_own_format_is_refused_with_a_remedy(deepspeeds: Path) -> None:
    (deepspeeds / "native").mkdir()
    (deepspeeds / "native/mp_rank_00_model_states.pt").touch()
    (deepspeeds / "latest").write_text("native")
    assert "unickpt convert" in Choices(str(deepspeeds), None).next().refused


def test_in_a_folder_of_both_frameworks_the_tracker_file_has_precedence(
    megatrons: Path,
) -> None:
    saved(megatrons, "x", "y", "global_step3")
    choice = Choices(str(megatrons), None).next()
    assert Path(choice.directory).name == "iter_0000002"
    assert "names global_step3, of step 3, which is later" in choice.notes[0]
    (megatrons / "latest").write_text("x")
    assert Choices(str(megatrons), None).next().notes == ()


def test_a_tracker_that_names_nothing_in_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("2")
    (tmp_path / "iter_0000001/data").mkdir(parents=True)
    choice = Choices(str(tmp_path), None).next()
    assert not choice.directory
    assert "names iteration 2, which does not exist. It has no complete checkpoint." in choice.missing
    (tmp_path / TRACKER).write_text("1")
    assert "names iteration 1, which is not complete" in Choices(str(tmp_path), None).next().missing
    (tmp_path / TRACKER).write_text("x")
    assert "holds 'x' instead of an iteration" in Choices(str(tmp_path), None).next().missing


def test_a_tracked_checkpoint_without_a_manifest_is_damage(megatrons: Path) -> None:
    """As one that was removed in part. One of Megatron's own formats is loaded by Megatron."""
    (megatrons / "iter_0000002/manifest.json").unlink()
    choice = Choices(str(megatrons), None).next()
    assert choice.name == "iter_0000003"
    assert "which is not complete" in choice.notes[0]


def test_a_step_that_is_not_there_is_no_other_checkpoint(megatrons: Path) -> None:
    choice = Choices(str(megatrons), 9).next()
    assert not choice.directory
    assert "--ckpt-step 9" in choice.missing
    assert "It has iter_0000003, iter_0000002, iter_0000001." in choice.missing
    (megatrons / "iter_0000009/data").mkdir(parents=True)
    assert "--ckpt-step 9" in Choices(str(megatrons), 9).next().missing, "a save that was interrupted"
    assert "does not exist" in Choices(str(megatrons / "nowhere"), 9).next().missing
    assert Choices(str(megatrons / "iter_0000003"), 3).next().explicit, "the folder itself"


def test_a_job_goes_back_behind_a_fault_that_the_witness_has_found(
    megatrons: Path, deepspeeds_alone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (megatrons / TRACKER).write_text("3")
    add_fault(megatrons, WitnessFault(1, 3, "SDC_REPLICA"))
    choices = Choices(str(megatrons), None)
    choice = choices.next()
    assert (choice.name, choice.step) == ("iter_0000001", 1)
    assert "iter_0000003 is of step 3, and may have traces of a fault after step 1: SDC_REPLICA" in choice.notes[0]
    assert choices.next() == Offer()
    assert not caplog.records
    for named in (Choices(str(megatrons), 2), Choices(str(megatrons / "iter_0000002"), None)):
        caplog.clear()
        assert named.next().explicit
        assert "SDC_REPLICA. It is loaded, because it was named" in caplog.text
    add_fault(megatrons, WitnessFault(0, 2, "SDC_AT_REST"))
    for folder in (megatrons, deepspeeds_alone):  # nothing is left: neither a start anew, nor Megatron's own function
        add_fault(folder, WitnessFault(0, 2, "SDC_AT_REST"))
        choice = Choices(str(folder), None).next()
        assert (choice.directory, choice.missing, len(choice.notes)) == ("", "", 1)


@pytest.fixture
def deepspeeds_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    saved(folder, "global_step3")
    return folder
