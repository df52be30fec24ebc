"""A real DeepSpeed job, of which one rank computes longer in the second half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks
from unickpt.cli.main import main

STEPS, LAYER_S, EXTRA = 12, 0.02, 0.5
ADDED_S = 8 * 3 * LAYER_S * EXTRA


def test_the_slow_rank_has_the_price_and_the_sound_step_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rings = tmp_path / "rings"
    fork_ranks(
        2, "tests.jobs.replay.timed_job", "deepspeed", "zero1", str(rings), str(STEPS), str(LAYER_S), "1", str(EXTRA),
        env={"GLOO_SOCKET_IFNAME": "lo"}, framework="deepspeed",
    )  # fmt: skip
    assert main(["whatif", str(rings), "--json", "--steps", "4:7"]) == 0
    sound = json.loads(capsys.readouterr().out)
    assert main(["whatif", str(rings), "--json", "--steps", "10:14", "--rank-like-peers", "1"]) == 0
    slow = json.loads(capsys.readouterr().out)
    for half in (sound, slow):
        assert half["replayed_s"] == pytest.approx(half["step_s"], rel=0.03)
    noise_s = max(sound["by_rank"].values())  # what other work on the machine does to ranks that are alike
    assert slow["by_rank"]["1"] == pytest.approx(ADDED_S, abs=0.15 * ADDED_S + noise_s)
    assert slow["by_rank"]["0"] < 0.05 * slow["step_s"] + noise_s
    assert noise_s < 0.5 * slow["by_rank"]["1"]
    assert slow["answers"][0]["step_s"] == pytest.approx(slow["step_s"] - slow["by_rank"]["1"])
