"""Every expert-parallel layout resumes under every other one, bit for bit, and the loss continues.

Layouts: {1 to 4 ranks} x {1 to 4 expert-parallel ranks} x {ZeRO 0, 1, 2} x {fp32, bf16, BF16_Optimizer}. CI loads a few pairs.
``UNICKPT_FULL_MATRIX=1`` loads all of them; with ``UNICKPT_MATRIX_PART=2/4``, those into the second quarter of the targets.
It also loads pipelines with experts, and experts with AutoTP.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.deepspeed.expert_names import pairs, piped_pairs, sequence_pairs, tensor_pairs
from tests.jobs.deepspeed.pairs import part, problems, run, strayed

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []
PAIRS = part(pairs(FULL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    run("experts", PAIRS, folder, timeout_s=7200 if FULL else 600)
    return folder


def test_every_state_of_every_expert_is_bit_equal_after_load(folder: Path) -> None:
    assert problems(PAIRS, folder) == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    assert strayed(PAIRS, folder) == {}


@pytest.mark.skipif(not FULL, reason="64 pairs")
def test_experts_in_a_pipeline_resume_with_any_other_number_of_stages(tmp_path: Path) -> None:
    """Losses of fp32 jobs alone are compared: in bf16, rounding sends a token to another expert, which moves a loss."""
    every = piped_pairs()
    run("piped experts", every, tmp_path, timeout_s=1500)
    assert problems(every, tmp_path) == {}
    assert strayed([pair for pair in every if all(layout.precision == "fp32" for layout in pair)], tmp_path) == {}


@pytest.mark.skipif(not FULL, reason="36 pairs")
def test_experts_with_sequence_parallelism_resume_with_any_other_degrees(tmp_path: Path) -> None:
    run("experts", sequence_pairs(), tmp_path, timeout_s=1500)
    assert problems(sequence_pairs(), tmp_path) == {}


@pytest.mark.skipif(not FULL, reason="144 pairs")
def test_experts_with_autotp_resume_with_any_other_degrees(tmp_path: Path) -> None:
    run("experts", tensor_pairs(), tmp_path, timeout_s=1500)
    assert problems(tensor_pairs(), tmp_path) == {}
    assert strayed([pair for pair in tensor_pairs() if all(layout.precision == "fp32" for layout in pair)], tmp_path) == {}
