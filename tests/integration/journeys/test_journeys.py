"""Training continues in another framework: from a transformers model in DeepSpeed to Megatron and back, with all
states, bit for bit, and out again as a model of transformers.

The other families and shapes are in ``python -m evidence.journeys``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.extent import FULL
from tests.jobs.journeys.families import BATCH, DECAY
from tests.jobs.journeys.journeys import (
    STEPS, Station, apart, differences, exported, of_transformers, rounding_of_logits, steps_of, travelled, uninterrupted,
)  # fmt: skip
from tests.jobs.journeys.station import LR
from tests.support.rounding import assert_continues

ZERO1, ZERO3 = Station("deepspeed", "zero1", 2), Station("deepspeed", "zero3", 2)
JOURNEYS = [
    (
        "llama",
        "fp32",
        [ZERO3, Station("torch", "1x2", 2), Station("megatron", "gpt-tp2pp2-fp32", 4), Station("torch", "2x2", 4), ZERO1],
    ),
]
if FULL:  # ``tests/integration/megatron/test_export.py`` has its experts too
    JOURNEYS.append(("qwen3_moe", "fp32", [ZERO1, Station("megatron", "moe-ep2dp2-fp32", 2)]))


@pytest.mark.parametrize(("family", "precision", "stations"), JOURNEYS)
def test_training_continues_in_the_other_framework(
    tmp_path: Path, family: str, precision: str, stations: list[Station]
) -> None:
    begin, before = of_transformers(tmp_path, family)
    rounding = rounding_of_logits(family)
    found = travelled(tmp_path, family, precision, stations, begin)
    compared, wrong = differences(begin, tmp_path / "0" / "loaded", family)
    assert wrong == []
    assert compared > 30
    assert apart(before, found[0]["logits"]) <= rounding
    for at in range(1, len(stations)):
        compared, wrong = differences(tmp_path / str(at - 1) / "trained", tmp_path / str(at) / "loaded", family)
        assert wrong == []
        assert compared > 100
        assert steps_of(tmp_path / str(at) / "loaded") == {at * STEPS}
        steps = at * STEPS
        counters = {"steps": steps, "samples": steps * BATCH, "schedule": steps * BATCH}
        assert found[at]["counters"].items() <= counters.items()
        assert found[at]["rate"] == LR * (1 - steps / DECAY)
        assert any("bytes read on this rank" in line for line in found[at]["report"])
        assert apart(found[at - 1]["logits_after"], found[at]["logits"]) <= rounding
    for at in {1, len(stations) - 1}:  # the result of Megatron's training, and the final result
        after = exported(tmp_path / str(at) / "trained", tmp_path / f"model{at}", tmp_path / "model")
        assert apart(after, found[at]["logits_after"]) <= rounding
    losses = [loss for station in found for loss in station["losses"]]
    alone = uninterrupted(tmp_path / "uninterrupted", family, precision, len(losses), begin)
    on_one = uninterrupted(tmp_path / "on one rank", family, precision, len(losses), begin, ranks=1)
    assert_continues(losses, alone, on_one)
