"""Experts in tensor-parallel jobs resume with any other degrees, whether the tensor-parallel ranks divide each expert or not.

CI loads a few pairs. ``UNICKPT_FULL_MATRIX=1`` loads all of them, also of pipelines and of sequence-parallel jobs, whose losses
DeepSpeed itself does not keep: it does not reduce their gradients under ZeRO 0 to 2.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.deepspeed.pairs import part, problems, run, strayed
from tests.jobs.deepspeed.tensor_expert_names import pairs

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(1800)] if FULL else []
PAIRS = part(pairs(FULL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor_experts")
    run("tensor experts", PAIRS, folder, timeout_s=1500 if FULL else 600)
    return folder


def test_every_state_of_every_expert_is_bit_equal_after_load(folder: Path) -> None:
    assert problems(PAIRS, folder) == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    alike = [pair for pair in PAIRS if all(layout.sequence == 1 for layout in pair)]
    assert strayed(alike, folder) == {}
