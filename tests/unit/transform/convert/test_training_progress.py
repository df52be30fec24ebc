"""Conversion of counters between frameworks: steps and samples, and schedulers that count either."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from unickpt.checkpoint.load.lr_progress import Progress, counted, state_at
from unickpt.transform.convert.training_progress import SCHEDULERS, of_job, of_schedule

JOB = Progress(10, 80)
MEGATRON = {"num_steps": 80, "lr_decay_style": "linear", "max_lr": 1e-3}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 1, 7, 10])
def test_a_count_goes_into_a_state_and_comes_back(kind: str, steps: int) -> None:
    meaning = SCHEDULERS[kind]
    fresh = {meaning.key: meaning.first, **meaning.others, "form": "its own"}
    progress = JOB.up_to(steps)
    assert progress == Progress(steps, 8 * steps)
    state = state_at(SCHEDULERS.get(kind), fresh, progress)
    assert state is not None
    assert state["form"] == "its own"
    assert counted(SCHEDULERS.get(kind), state, JOB) == progress


def rate(step: int) -> float:
    return min(step / 4, 1.0) * 0.9**step


def deepspeeds(kind: str, parameters: list[torch.nn.Parameter]) -> Any:
    """Return a scheduler of DeepSpeed or torch, with a new optimizer."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    if kind == "LambdaLR":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    module = pytest.importorskip("deepspeed.runtime.lr_schedules")
    settings: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_max_lr": 0.5, "warmup_num_steps": 4},
        "WarmupDecayLR": {"total_num_steps": 12, "warmup_max_lr": 0.5, "warmup_num_steps": 4},
        "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4},
        "LRRangeTest": {"lr_range_test_step_size": 3},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "decay_step_size": 2},
    }
    return getattr(module, kind)(optimizer, **settings[kind])


@pytest.mark.parametrize("kind", [kind for kind, meaning in SCHEDULERS.items() if meaning.unit == "steps"])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_moved_scheduler_continues_like_one_that_stepped(kind: str, steps: int) -> None:
    """Compare state, current rates and later rates with the real classes."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    walked, moved = deepspeeds(kind, parameters), deepspeeds(kind, parameters)
    for _ in range(steps):
        walked.optimizer.step()
        walked.step()
    assert counted(SCHEDULERS.get(kind), walked.state_dict(), JOB) == JOB.up_to(steps)
    moved.optimizer.step()
    state = state_at(SCHEDULERS.get(kind), moved.state_dict(), Progress(steps - 1))
    assert state is not None
    moved.load_state_dict(state)
    moved.step()
    for _ in range(3):
        assert moved.state_dict() == walked.state_dict()
        assert [group["lr"] for group in moved.optimizer.param_groups] == [g["lr"] for g in walked.optimizer.param_groups]
        walked.step()
        moved.step()


def test_an_unknown_scheduler_is_not_moved() -> None:
    assert state_at(SCHEDULERS.get("StepLR"), {"last_epoch": 3}, JOB) is None
    assert counted(SCHEDULERS.get("StepLR"), {"last_epoch": 3}, JOB) is None
    assert state_at(SCHEDULERS.get("WarmupLR"), {"other": 3}, JOB) is None
    assert state_at(SCHEDULERS.get("OptimizerParamScheduler"), {"num_steps": 0}, Progress(10)) is None  # samples are unknown
    for wrong in (None, "3", 2.5, True, -2, 1 << 70):
        assert counted(SCHEDULERS.get("WarmupLR"), {"last_batch_iteration": wrong}, JOB) is None


def test_unknown_samples_are_steps_times_the_batch() -> None:
    assert Progress(10).with_batch(8) == JOB
    assert JOB.with_batch(3) == JOB
    assert Progress(10).up_to(4) == Progress(4)


def test_progress_in_a_deepspeed_checkpoint() -> None:
    engine = {"global_steps": 10, "global_samples": 80, "skipped_steps": 2}
    assert of_job(10, {"engine": engine}) == JOB
    assert of_schedule(10, {"engine": engine}) == Progress(8, 64)  # overflows do not step it
    saved = {"class": "WarmupLR", "state": {"last_batch_iteration": 6}}
    assert of_schedule(10, {"engine": engine, "lr_scheduler": saved}) == Progress(7, 56)
    unknown = {"class": "Own", "state": {"at": 6}}
    assert of_schedule(10, {"engine": engine, "lr_scheduler": unknown}) == Progress(8, 64)
    assert of_job(10, {"engine": {**engine, "global_samples": 0}}) == Progress(10)  # a counter that was not kept
    assert of_job(0, {"engine": {"global_samples": 0}}) == Progress(0, 0)


def test_progress_in_a_megatron_checkpoint() -> None:
    arguments = argparse.Namespace(consumed_train_samples=80)
    common = {"args": arguments, "opt_param_scheduler": {**MEGATRON, "num_steps": 64}}
    assert of_job(10, {"common": common}) == JOB
    assert of_schedule(10, {"common": common}) == Progress(8, 64)
    assert of_job(10, {"common": {"scheduler": MEGATRON}}) == JOB  # megatron_unickpt.save has no arguments
    assert of_schedule(10, {"common": {"scheduler": MEGATRON}}) == JOB
    assert of_job(10, {"common": {"scheduler": {"num_steps": 80}}}) == Progress(10)  # of another program
    assert of_schedule(10, {"common": {"args": arguments}}) == JOB


def test_no_value_in_a_file_raises() -> None:
    for objects in ({}, {"engine": 3, "common": 4}, {"common": {"args": 5, "scheduler": 6}}, {"lr_scheduler": {"state": 7}}):
        assert of_job(3, objects) == Progress(3)
        assert of_schedule(3, objects) == Progress(3)
