"""Every pipeline layout resumes under every other one, and as a plain module, bit for bit, and the loss continues.

Layouts: {1 to 4 stages} x {1 to 3 data-parallel ranks} x {ZeRO 0, 1} x {fp32, bf16, BF16_Optimizer} on at most 4 ranks, and the
same model as a plain module under ZeRO 0 to 3. CI loads a few pairs. ``UNICKPT_FULL_MATRIX=1`` loads all of them;
with ``UNICKPT_MATRIX_PART=2/4``, those into the second quarter of the targets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.deepspeed.pairs import part, problems, run, strayed
from tests.jobs.deepspeed.pipeline_names import pairs

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []
PAIRS = part(pairs(FULL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    run("pipelines", PAIRS, folder, timeout_s=7200 if FULL else 600)
    return folder


def test_every_state_of_every_stage_is_bit_equal_after_load(folder: Path) -> None:
    assert problems(PAIRS, folder) == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    assert strayed(PAIRS, folder) == {}
