"""Lightning's ``DeepSpeedStrategy``, unchanged: saved by ``ModelCheckpoint``, resumed under another layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hf.jobs import assert_same_state, recorded, run

pytestmark = [pytest.mark.hf, pytest.mark.timeout(400)]

STEPS, SAVED = 6, 3
COMMON = ("--max_steps", str(STEPS), "--save_steps", str(SAVED))


@dataclass(frozen=True)
class Runs:
    """ZeRO-2 on 2 processes without interruption, and from its step 3 ZeRO-3 on 1 process."""

    uninterrupted: Path
    resumed: Path


def config(stage: int, *, enabled: bool = True) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "unickpt": {"enabled": enabled}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    work = tmp_path_factory.mktemp("lightning")
    source, target = work / "zero2x2", work / "zero3x1"
    run("train_lightning", 2, source, config(2), *COMMON)
    run("train_lightning", 1, target, config(3), *COMMON, "--resume", str(source / f"step={SAVED}.ckpt"))
    return Runs(source, target)


def test_weights_and_moments_are_equal_bit_for_bit_after_a_resume(runs: Runs) -> None:
    saved, before = recorded(runs.uninterrupted, f"save-{SAVED}")
    found, after = recorded(runs.resumed, "begin")
    assert after["step"] == before["step"] == SAVED
    assert_same_state(found, saved)


def test_losses_and_learning_rates_continue_as_if_never_interrupted(runs: Runs) -> None:
    _, uninterrupted = recorded(runs.uninterrupted, "end")
    _, resumed = recorded(runs.resumed, "end")
    assert resumed["lr"] == uninterrupted["lr"]
    assert resumed["losses"] == pytest.approx(uninterrupted["losses"][SAVED:], abs=1e-5, rel=0)


def test_lightnings_directory_holds_a_universal_checkpoint(runs: Runs) -> None:
    folder = runs.uninterrupted / f"step={SAVED}.ckpt"
    assert (folder / "checkpoint" / "manifest.json").is_file()
    assert not list((folder / "checkpoint").glob("*.pt"))


def test_a_failed_save_ends_training_before_lightning_deletes_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelCheckpoint with ``save_top_k=1`` deletes the last checkpoint when a save returns, whatever it returned."""
    monkeypatch.setenv("BREAK_SAVE", f"full:step={STEPS}.ckpt")
    process = run("train_lightning", 1, tmp_path, config(2), *COMMON, "--keep", "1", check=False)
    assert process.returncode != 0
    assert "would now delete the last one" in process.stdout, process.stdout[-3000:]
    assert (tmp_path / f"step={SAVED}.ckpt" / "checkpoint" / "manifest.json").is_file()
