"""Every tensor-parallel layout (AutoTP) resumes under every other one, bit for bit, and the loss continues.

Layouts: {1 to 4 tensor-parallel ranks} x {1, 2 data-parallel ranks} x {ZeRO 0 to 3} x {fp32, bf16, BF16_Optimizer} on at most
4 ranks, with the vocabulary whole, divided by rows and by columns. CI loads a few pairs. ``UNICKPT_FULL_MATRIX=1`` loads all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.deepspeed.pairs import part, problems, run, strayed
from tests.jobs.deepspeed.tensor_names import pairs

FULL = os.environ.get("UNICKPT_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []
PAIRS = part(pairs(FULL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors")
    run("tensors", PAIRS, folder, timeout_s=7200 if FULL else 600)
    return folder


def test_every_state_is_bit_equal_after_load(folder: Path) -> None:
    assert problems(PAIRS, folder) == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    assert strayed(PAIRS, folder) == {}
