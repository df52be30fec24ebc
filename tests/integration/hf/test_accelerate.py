"""Accelerate's ``save_state`` and ``load_state``, unchanged, across world sizes and ZeRO stages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.hf.jobs import ResumedRun, assert_same_state, recorded, run, shipped
from tests.support.rounding import assert_continues, in_steps

pytestmark = [pytest.mark.hf, pytest.mark.timeout(400)]

STEPS, SAVED = 9, 3
COMMON = ("--max_steps", str(STEPS), "--save_steps", str(SAVED))


def accelerate_json(name: str) -> dict[str, Any]:
    """Return a JSON with two values that Trainer adds and Accelerate does not."""
    config = shipped(name)
    config["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    """ZeRO-2 on 2 processes, and from its step 3 ZeRO-3 on 1 process."""
    work = tmp_path_factory.mktemp("accelerate")
    source, target = work / "zero2x2", work / "zero3x1"
    run("train_accelerate", 2, source, accelerate_json("hf_zero2_auto"), *COMMON)
    resume = ("--resume", str(source / f"step-{SAVED}"))
    run("train_accelerate", 1, target, accelerate_json("hf_zero3_auto"), *COMMON, *resume)
    unsaved = ("--max_steps", str(STEPS), "--save_steps", "99")
    run("train_accelerate", 1, work / "zero2x1", accelerate_json("hf_zero2_auto"), *unsaved)
    return ResumedRun(source, target, SAVED, work / "zero2x1")


def test_weights_and_moments_are_equal_bit_for_bit_after_load_state(runs: ResumedRun) -> None:
    saved, before = recorded(runs.uninterrupted, f"save-{SAVED}")
    found, after = recorded(runs.resumed, "begin")
    assert_same_state(found, saved)
    assert (after["step"], after["lr"]) == (before["step"], before["lr"]) == (SAVED, 5e-3)


def test_losses_equal_those_of_an_uninterrupted_run(runs: ResumedRun) -> None:
    _, uninterrupted = recorded(runs.uninterrupted, "end")
    _, resumed = recorded(runs.resumed, "end")
    assert resumed["lr"] == uninterrupted["lr"]
    expected = {step: loss for step, loss in uninterrupted["losses"].items() if int(step) > SAVED}
    _, elsewhere = recorded(runs.elsewhere, "end")
    assert resumed["losses"].keys() == expected.keys()
    assert_continues(*(in_steps(each, sorted(expected)) for each in (resumed["losses"], expected, elsewhere["losses"])))


def test_accelerates_folder_holds_a_universal_checkpoint(runs: ResumedRun) -> None:
    folder = runs.uninterrupted / f"step-{SAVED}"
    assert (folder / "latest").read_text() == "pytorch_model"
    assert (folder / "pytorch_model" / "manifest.json").is_file()
    assert not list((folder / "pytorch_model").glob("*.pt"))


def test_accelerates_plugin_keeps_the_key(runs: ResumedRun) -> None:
    _, facts = recorded(runs.resumed, "end")
    assert facts["config"]["unickpt"] == {"enabled": True}
