"""Lightning's ``DeepSpeedStrategy``, unchanged: saved by ``ModelCheckpoint``, resumed under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.hf.jobs import ResumedRun, assert_same_state, recorded, run
from tests.support.rounding import assert_continues

pytestmark = [pytest.mark.hf, pytest.mark.timeout(400)]

STEPS, SAVED = 6, 3
COMMON = ("--max_steps", str(STEPS), "--save_steps", str(SAVED))


def config(stage: int, *, enabled: bool = True) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "unickpt": {"enabled": enabled}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    """ZeRO-2 on 2 processes, and from its step 3 ZeRO-3 on 1 process."""
    work = tmp_path_factory.mktemp("lightning")
    source, target = work / "zero2x2", work / "zero3x1"
    run("train_lightning", 2, source, config(2), *COMMON)
    run("train_lightning", 1, target, config(3), *COMMON, "--resume", str(source / f"step={SAVED}.ckpt"))
    run("train_lightning", 1, work / "zero2x1", config(2), "--max_steps", str(STEPS), "--save_steps", "99")
    return ResumedRun(source, target, SAVED, work / "zero2x1")


def test_weights_and_moments_are_equal_bit_for_bit_after_a_resume(runs: ResumedRun) -> None:
    saved, before = recorded(runs.uninterrupted, f"save-{SAVED}")
    found, after = recorded(runs.resumed, "begin")
    assert after["step"] == before["step"] == SAVED
    assert_same_state(found, saved)


def test_losses_and_learning_rates_equal_those_of_an_uninterrupted_run(runs: ResumedRun) -> None:
    _, uninterrupted = recorded(runs.uninterrupted, "end")
    _, resumed = recorded(runs.resumed, "end")
    assert resumed["lr"] == uninterrupted["lr"]
    _, elsewhere = recorded(runs.elsewhere, "end")
    assert_continues(resumed["losses"], uninterrupted["losses"][SAVED:], elsewhere["losses"][SAVED:])


def test_lightnings_directory_holds_a_universal_checkpoint(runs: ResumedRun) -> None:
    folder = runs.uninterrupted / f"step={SAVED}.ckpt"
    assert (folder / "checkpoint" / "manifest.json").is_file()
    assert not list((folder / "checkpoint").glob("*.pt"))


def test_a_failed_save_ends_training_before_lightning_deletes_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelCheckpoint with ``save_top_k=1`` deletes the last checkpoint when a save returns, whatever the result."""
    monkeypatch.setenv("BREAK_SAVE", f"full:step={STEPS}.ckpt")
    process = run("train_lightning", 1, tmp_path, config(2), *COMMON, "--keep", "1", check=False)
    assert process.returncode != 0
    assert "would now delete the last one" in process.stdout, process.stdout[-3000:]
    assert (tmp_path / f"step={SAVED}.ckpt" / "checkpoint" / "manifest.json").is_file()
