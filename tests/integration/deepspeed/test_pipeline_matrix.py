"""Every pipeline layout resumes under every other one, and as a plain module, bit for bit, and the loss continues.

Layouts: {1 to 4 stages} x {1 to 3 data-parallel ranks} x {ZeRO 0, 1} x {fp32, bf16, BF16_Optimizer} on at most 4 ranks, and the
same model as a plain module under ZeRO 0 to 3. CI loads a few pairs. ``UNICKPT_FULL_MATRIX=1`` loads all of them.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deepspeed.pipeline_names import PipelineLayout, pairs
from unickpt.testing.launch import fork_ranks

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []
STEPS_BEFORE = 3
PAIRS = pairs(FULL)
SOURCES = list(dict.fromkeys(source for source, _ in PAIRS))
NOISE_FACTOR = 2.0  # see ``test_matrix.py``
FP32_ULP = 4.8e-7  # 2**-21, of a loss between 4 and 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save all sources, then load them."""
    folder = tmp_path_factory.mktemp("pipelines")
    chosen: dict[PipelineLayout, list[PipelineLayout]] = {}
    for source, target in PAIRS:
        chosen.setdefault(target, []).append(source)
    wanted = [(target.to_json(), [source.to_json() for source in sources]) for target, sources in chosen.items()]
    (folder / "pairs.json").write_text(json.dumps(wanted))
    fork_ranks(4, "tests.integration.deepspeed.pipeline_worker", str(folder), timeout_s=7200 if FULL else 600)
    return folder


def results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    targets = dict.fromkeys(target.name for _, target in PAIRS)
    read = {target: json.loads((folder / f"results-{target}.json").read_text()) for target in targets}
    return {(found["source"], target): found for target, each in read.items() for found in each}


def losses(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_every_state_of_every_stage_is_bit_equal_after_load(folder: Path) -> None:
    found = results(folder)
    assert found.keys() == {(source.name, target.name) for source, target in PAIRS}
    assert {pair: each["problems"] for pair, each in found.items() if each["problems"]} == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    runs = {
        precision: [losses(folder, source.name) for source in SOURCES if source.precision == precision]
        for precision in {layout.precision for pair in PAIRS for layout in pair}
    }
    noise = {
        (a, b): max(abs(x - y) for one in runs[a] for other in runs[b] for x, y in zip(one, other, strict=True))
        for a, b in itertools.product(runs, runs)
    }
    found, strayed = results(folder), {}
    for source, target in PAIRS:
        after = found[source.name, target.name]["losses"]
        difference = max(abs(x - y) for x, y in zip(after, losses(folder, source.name)[STEPS_BEFORE:], strict=True))
        exact = source == target and source.precision == "fp32"  # in bf16, engines that a process had before have an effect
        limit = 0.0 if exact else NOISE_FACTOR * noise[source.precision, target.precision] + FP32_ULP
        if difference > limit:
            strayed[source.name, target.name] = (difference, limit)
    assert strayed == {}
