"""A real DeepSpeed job with a slow rank: its plan of precision, and the job with this plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.plan.precision import planned, ran
from tests.integration.plan.precision_job import SLOW, SPEEDUP
from unickpt.cli.main import main

JOB = {"kind": "deepspeed", "world": 2, "stage": 1, "layers": [0.03, 0.01, 0.02, 0.02, 0.02], "slow": [1]}


def test_a_slow_rank_with_its_plan_no_longer_holds_up_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, plan = tmp_path / "saved", tmp_path / "plan.json"
    before = ran(JOB, tmp_path, "before", save=str(saved))
    found = planned(JOB, tmp_path, plan, "--checkpoint", str(saved))
    (group,) = found["groups"]
    own = 3 * sum(JOB["layers"])  # forward and backward of a sound rank
    assert found["indicator"] == "second-moment"
    assert group["ranks"] == [1]
    assert group["needed_s"] == pytest.approx(own * (SLOW - 1), rel=0.25)
    assert group["most_s"] == pytest.approx(own * SLOW * (1 - 1 / SPEEDUP), rel=0.15)
    low = [layer for layer in group["layers"] if layer["low"]]
    assert 0 < len(low) < len(group["layers"])
    assert sum(layer["error"] for layer in low) == pytest.approx(group["error"])
    assert json.loads(plan.read_text()) == found
    after = ran(JOB, tmp_path, "after", load=str(saved), plan=str(plan))
    assert before["step_s"] > 1.4 * after["step_s"]
    assert found["step_s"] == pytest.approx(after["step_s"], rel=0.15)
    whole = ran(JOB, tmp_path, "whole", load=str(saved))
    assert after["losses"] == pytest.approx(whole["losses"], rel=1e-2)
    assert after["losses"] != whole["losses"]

    arguments = ["plan", "precision", str(tmp_path / "before"), "--speedup", "2"]
    assert main([*arguments, "--ranks", "1"]) == 0
    assert "ranks 1: " in capsys.readouterr().out
    assert main([*arguments, "--ranks", "0,1", "--speedup", "1.1"]) == 0  # rank 0 is not slow
    assert "speed binds" in capsys.readouterr().out
    assert main([*arguments, "--ranks", "7"]) == 2
    assert "ranks 7 have no times of layers; there are those of ranks 0, 1" in capsys.readouterr().err
    assert main([*arguments, "--device", "A100"]) == 2
    assert "no rank has the device 'A100'" in capsys.readouterr().err
