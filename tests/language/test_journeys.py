"""A training goes on in another framework: from DeepSpeed to Megatron and back, with all states, bit for bit.

The other families and shapes are in ``scripts/journeys.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.language.families import BATCH, DECAY, huggingface_model, rows
from tests.language.journeys import STEPS, Station, differences, steps_of, travelled, uninterrupted
from tests.language.station import LR
from unickpt.cli.main import main

ZERO1, ZERO3 = Station("deepspeed", "zero1", 2), Station("deepspeed", "zero3", 2)
JOURNEYS = [
    ("llama", "fp32", [ZERO3, Station("megatron", "gpt-tp2pp2-fp32", 4), ZERO1]),
    ("qwen3_moe", "fp32", [ZERO1, Station("megatron", "moe-ep2dp2-fp32", 2)]),
]


def exported(checkpoint: Path, folder: Path, family: str) -> torch.Tensor:
    """Logits of the model that ``from_pretrained`` makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    other = huggingface_model(family, seed=99)
    other.save_pretrained(folder.with_name("other"))
    assert (
        main(["export", str(checkpoint), str(folder), "--config", str(folder.with_name("other")), "--shard-gigabytes", "1e-4"])
        == 0
    )
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(rows(0)[:, :-1]).logits
    return logits


@pytest.mark.parametrize(("family", "precision", "stations"), JOURNEYS)
def test_a_training_goes_on_in_the_other_framework(
    tmp_path: Path, family: str, precision: str, stations: list[Station]
) -> None:
    found = travelled(tmp_path, family, precision, stations)
    for at in range(1, len(stations)):
        compared, wrong = differences(tmp_path / str(at - 1) / "trained", tmp_path / str(at) / "loaded", family)
        assert wrong == []
        assert compared > 100
        assert steps_of(tmp_path / str(at) / "loaded") == {at * STEPS}
        steps = at * STEPS
        counters = {"steps": steps, "samples": steps * BATCH, "schedule": steps * BATCH}
        assert found[at]["counters"].items() <= counters.items()
        assert found[at]["rate"] == LR * (1 - steps / DECAY)
        assert any("unaccounted: 0" in line for line in found[at]["report"])
        before, after = torch.tensor(found[at - 1]["logits_after"]), torch.tensor(found[at]["logits"])
        assert (before - after).abs().max() <= 4e-7 * max(float(before.abs().max()), 1.0)  # float32, other orders of sums
    logits = exported(tmp_path / "1" / "trained", tmp_path / "model", family)  # what Megatron has trained
    after = torch.tensor(found[1]["logits_after"])
    assert (logits - after).abs().max() <= 4e-7 * max(float(after.abs().max()), 1.0)
    losses = [loss for station in found for loss in station["losses"]]
    assert losses == pytest.approx(uninterrupted(tmp_path / "uninterrupted", family, precision, len(losses)), rel=2e-6)
