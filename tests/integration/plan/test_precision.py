"""A real DeepSpeed job with a slow rank: its plan of precision, and the job with this plan.

Times of a step are no assertion, because other work on the machine changes them: ``python -m evidence.plan.precision``
measures them. What the layers were asked to sleep is the same everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs.plan.precision import planned, ran
from tests.jobs.plan.precision_job import SLOW, SPEEDUP
from tests.support.extent import in_full
from unickpt.cli.main import main

JOB = {"kind": "deepspeed", "world": 2, "stage": 1, "layers": [0.03, 0.01, 0.02, 0.02, 0.02], "slow": [1]}


@in_full
def test_a_slow_rank_with_its_plan_no_longer_holds_up_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, plan = tmp_path / "saved", tmp_path / "plan.json"
    before = ran(JOB, tmp_path, "before", save=str(saved))
    found = planned(JOB, tmp_path, plan, "--checkpoint", str(saved))
    (group,) = found["groups"]
    assert found["indicator"] == "second-moment"
    assert group["ranks"] == [1]
    assert group["needed_s"] > 0
    assert group["most_s"] > 0
    low = [at for at, layer in enumerate(group["layers"]) if layer["low"]]
    assert low
    assert sum(group["layers"][at]["error"] for at in low) == pytest.approx(group["error"])
    assert json.loads(plan.read_text()) == found
    after = ran(JOB, tmp_path, "after", load=str(saved), plan=str(plan))
    assert before["asked_s"] == pytest.approx(3 * SLOW * sum(JOB["layers"]))  # forward, and backward for twice as long
    gained_s = 3 * SLOW * sum(JOB["layers"][at] for at in low) * (1 - 1 / SPEEDUP)
    assert after["asked_s"] == pytest.approx(before["asked_s"] - gained_s)
    whole = ran(JOB, tmp_path, "whole", load=str(saved))
    assert after["losses"] == pytest.approx(whole["losses"], rel=4 * torch.finfo(torch.bfloat16).eps)
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
