"""Jobs with Megatron-style tensor parallelism, as pipelines and as plain modules, resume under other layouts, bit for bit.

CI loads a few pairs. ``UNICKPT_FULL_MATRIX=1`` also loads jobs with parameters to average.
``python -m evidence.deepspeed.megatron_table`` loads the table of 3D layouts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.deepspeed.megatron_names import averaged_pairs, pairs, sequence_pairs
from tests.jobs.deepspeed.pairs import problems, run, strayed

PAIRS = pairs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    run("megatron", PAIRS, folder, timeout_s=600)
    return folder


def test_every_state_is_bit_equal_after_load(folder: Path) -> None:
    assert problems(PAIRS, folder) == {}


def test_losses_continue_as_in_an_uninterrupted_run(folder: Path) -> None:
    assert strayed(PAIRS, folder) == {}


@pytest.mark.skipif(os.environ.get("UNICKPT_FULL_MATRIX") != "1", reason="64 pairs")
@pytest.mark.timeout(1800)
def test_parameters_to_average_keep_the_values_of_each_rank_or_take_the_mean(tmp_path: Path) -> None:
    run("averaged", averaged_pairs(), tmp_path, timeout_s=1500)
    assert problems(averaged_pairs(), tmp_path) == {}


@pytest.mark.skipif(os.environ.get("UNICKPT_FULL_MATRIX") != "1", reason="36 pairs")
@pytest.mark.timeout(1800)
def test_tensor_parallel_jobs_with_sequence_parallelism_resume_with_any_other_degrees(tmp_path: Path) -> None:
    run("megatron", sequence_pairs(), tmp_path, timeout_s=1500)
    assert problems(sequence_pairs(), tmp_path) == {}
