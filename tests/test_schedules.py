"""What counters of one framework mean in another: steps and samples, and the schedulers that count one or the other."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from unickpt import schedules
from unickpt.schedules import SCHEDULERS, Progress, counted, of_job, of_schedule, state_at

JOB = Progress(10, 80)
MEGATRON = {"num_steps": 80, "lr_decay_style": "linear", "max_lr": 1e-3}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 1, 7, 10])
def test_a_count_goes_into_a_state_and_comes_back(kind: str, steps: int) -> None:
    meaning = SCHEDULERS[kind]
    fresh = {meaning.key: meaning.first, **meaning.others, "form": "its own"}
    progress = JOB.up_to(steps)
    assert progress == Progress(steps, 8 * steps)
    state = state_at(kind, fresh, progress)
    assert state is not None
    assert state["form"] == "its own"
    assert counted(kind, state, JOB) == progress


def rate(step: int) -> float:
    return min(step / 4, 1.0) * 0.9**step


def deepspeeds(kind: str, parameters: list[torch.nn.Parameter]) -> Any:
    """A scheduler of DeepSpeed, or torch's, with an optimizer of its own."""
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
def test_a_scheduler_that_was_moved_goes_on_as_one_that_stepped(kind: str, steps: int) -> None:
    """The real classes: state, rates, and all that comes after."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    walked, moved = deepspeeds(kind, parameters), deepspeeds(kind, parameters)
    for _ in range(steps):
        walked.optimizer.step()
        walked.step()
    assert counted(kind, walked.state_dict(), JOB) == JOB.up_to(steps)
    moved.optimizer.step()
    state = state_at(kind, moved.state_dict(), Progress(steps - 1))
    assert state is not None
    moved.load_state_dict(state)
    moved.step()
    for _ in range(3):
        assert moved.state_dict() == walked.state_dict()
        assert [group["lr"] for group in moved.optimizer.param_groups] == [g["lr"] for g in walked.optimizer.param_groups]
        walked.step()
        moved.step()


def test_what_is_not_known_is_not_moved() -> None:
    assert state_at("StepLR", {"last_epoch": 3}, JOB) is None
    assert counted("StepLR", {"last_epoch": 3}, JOB) is None
    assert state_at("WarmupLR", {"other": 3}, JOB) is None
    assert state_at("OptimizerParamScheduler", {"num_steps": 0}, Progress(10)) is None  # nobody has counted samples
    for wrong in (None, "3", 2.5, True, -2, 1 << 70):
        assert counted("WarmupLR", {"last_batch_iteration": wrong}, JOB) is None


def test_samples_that_nobody_counted_are_steps_of_the_batch() -> None:
    assert Progress(10).with_batch(8) == JOB
    assert JOB.with_batch(3) == JOB
    assert Progress(10).up_to(4) == Progress(4)


def test_what_deepspeed_stores() -> None:
    engine = {"global_steps": 10, "global_samples": 80, "skipped_steps": 2}
    assert of_job(10, {"engine": engine}) == JOB
    assert of_schedule(10, {"engine": engine}) == Progress(8, 64)  # overflows do not step it
    saved = {"class": "WarmupLR", "state": {"last_batch_iteration": 6}}
    assert of_schedule(10, {"engine": engine, "lr_scheduler": saved}) == Progress(7, 56)
    unknown = {"class": "Own", "state": {"at": 6}}
    assert of_schedule(10, {"engine": engine, "lr_scheduler": unknown}) == Progress(8, 64)
    assert of_job(10, {"engine": {**engine, "global_samples": 0}}) == Progress(10)  # a counter that was not kept
    assert of_job(0, {"engine": {"global_samples": 0}}) == Progress(0, 0)


def test_what_megatron_stores() -> None:
    arguments = argparse.Namespace(consumed_train_samples=80)
    common = {"args": arguments, "opt_param_scheduler": {**MEGATRON, "num_steps": 64}}
    assert of_job(10, {"common": common}) == JOB
    assert of_schedule(10, {"common": common}) == Progress(8, 64)
    assert of_job(10, {"common": {"scheduler": MEGATRON}}) == JOB  # megatron_unickpt.save has no arguments
    assert of_schedule(10, {"common": {"scheduler": MEGATRON}}) == JOB
    assert of_job(10, {"common": {"scheduler": {"num_steps": 80}}}) == Progress(10)  # of somebody else's
    assert of_schedule(10, {"common": {"args": arguments}}) == JOB


def test_nothing_that_a_file_says_raises() -> None:
    for objects in ({}, {"engine": 3, "common": 4}, {"common": {"args": 5, "scheduler": 6}}, {"lr_scheduler": {"state": 7}}):
        assert schedules.of_job(3, objects) == Progress(3)
        assert schedules.of_schedule(3, objects) == Progress(3)
