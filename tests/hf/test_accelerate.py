"""Accelerate's ``save_state`` and ``load_state``, unchanged, across world sizes and ZeRO stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hf.jobs import assert_same_state, recorded, run, shipped

pytestmark = [pytest.mark.hf, pytest.mark.timeout(400)]

STEPS, SAVED = 9, 3
COMMON = ("--max_steps", str(STEPS), "--save_steps", str(SAVED))


@dataclass(frozen=True)
class Runs:
    """ZeRO-2 on 2 processes, never interrupted, and from its step 3 ZeRO-3 on 1 process."""

    uninterrupted: Path
    resumed: Path


def accelerate_json(name: str) -> dict[str, Any]:
    """A shipped JSON with the two values that Trainer fills in and Accelerate does not."""
    config = shipped(name)
    config["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    work = tmp_path_factory.mktemp("accelerate")
    source, target = work / "zero2x2", work / "zero3x1"
    run("train_accelerate", 2, source, accelerate_json("hf_zero2_auto"), *COMMON)
    resume = ("--resume", str(source / f"step-{SAVED}"))
    run("train_accelerate", 1, target, accelerate_json("hf_zero3_auto"), *COMMON, *resume)
    return Runs(source, target)


def test_weights_and_moments_are_equal_bit_for_bit_after_load_state(runs: Runs) -> None:
    saved, before = recorded(runs.uninterrupted, f"save-{SAVED}")
    found, after = recorded(runs.resumed, "begin")
    assert_same_state(found, saved)
    assert (after["step"], after["lr"]) == (before["step"], before["lr"]) == (SAVED, 5e-3)


def test_losses_go_on_as_if_never_interrupted(runs: Runs) -> None:
    """In fp32 they differ by two units in the last place, as another order of addition does."""
    _, uninterrupted = recorded(runs.uninterrupted, "end")
    _, resumed = recorded(runs.resumed, "end")
    assert resumed["lr"] == uninterrupted["lr"]
    expected = {step: loss for step, loss in uninterrupted["losses"].items() if int(step) > SAVED}
    assert resumed["losses"] == pytest.approx(expected, abs=1e-5, rel=0)


def test_accelerates_own_tag_is_a_universal_checkpoint(runs: Runs) -> None:
    folder = runs.uninterrupted / f"step-{SAVED}"
    assert (folder / "latest").read_text() == "pytorch_model"
    assert (folder / "pytorch_model" / "manifest.json").is_file()
    assert not list((folder / "pytorch_model").glob("*.pt"))


def test_the_key_goes_through_accelerates_plugin(runs: Runs) -> None:
    _, facts = recorded(runs.resumed, "end")
    assert facts["config"]["unickpt"] == {"enabled": True}
