"""Trainer with tensor parallelism (AutoTP) on four processes resumes on two processes without it."""

from __future__ import annotations

import pytest
import torch

from tests.jobs.hf.jobs import (
    GLOBAL_BATCH,
    ResumedRun,
    assert_log_continues,
    log_of,
    losses,
    losses_of,
    recorded,
    run,
    shipped,
)  # fmt: skip

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

STEPS, SAVED = 4, 2
COMMON = (
    "--use_cpu", "--max_steps", str(STEPS), "--save_steps", str(SAVED), "--logging_steps", "1",
    "--learning_rate", "5e-3", "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True",
    "--per_device_train_batch_size", str(GLOBAL_BATCH // 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    work = tmp_path_factory.mktemp("tensor")
    source, target = work / "tp2dp2", work / "dp2"
    divided = shipped("hf_zero2_auto", stage=1) | {"tensor_parallel": {"autotp_size": 2}}
    run("train_trainer", 4, source, divided, *COMMON)
    resume = ("--resume", str(source / f"checkpoint-{SAVED}"))
    run("train_trainer", 2, target, shipped("hf_zero2_auto"), *COMMON, *resume)
    run("train_trainer", 2, work / "alone", shipped("hf_zero2_auto"), *COMMON, "--save_strategy", "no")
    return ResumedRun(source, target, SAVED, work / "alone")


def test_the_first_ranks_part_of_every_state_is_in_the_whole_state(pair: ResumedRun) -> None:
    saved, _ = recorded(pair.uninterrupted, f"save-{SAVED}")
    found, facts = recorded(pair.resumed, "begin")
    assert facts["step"] == SAVED
    assert found.keys() == saved.keys()
    assert sum(found[name].shape != part.shape for name, part in saved.items()) > 40  # the others are whole on every rank
    for name, part in saved.items():
        assert torch.equal(found[name][tuple(slice(extent) for extent in part.shape)], part), name


def test_losses_equal_those_of_an_uninterrupted_run(pair: ResumedRun) -> None:
    before = losses(log_of(pair.uninterrupted / f"checkpoint-{STEPS}"))
    after = losses(log_of(pair.resumed / f"checkpoint-{STEPS}"))
    assert_log_continues(after, before, losses_of(pair.elsewhere))
