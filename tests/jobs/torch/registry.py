"""The scenarios in plain torch, and what they share. Each is a function ``name(folder)`` with assertions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests.jobs.torch.layouts import Layout
from tests.jobs.torch.model import Job
from tests.jobs.torch.pairs_worker import differences
from tests.support.logs import logged as logged

REGISTRY: dict[str, tuple[tuple[int, ...], Callable[[Path], None]]] = {}
ADAMW = "fp32-adamw"


def scenario(*worlds: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Mark a function as a scenario for these world sizes."""

    def mark(function: Callable[[Path], None]) -> Callable[[Path], None]:
        REGISTRY[function.__name__] = (worlds, function)
        return function

    return mark


def job_of(shape: str, seed: int, kind: str = ADAMW) -> Job:
    return Job(Layout.parse(f"{shape}-{kind}"), seed)


def state_dict_of(job: Job, *, flat: bool = False) -> dict[str, Any]:
    model, optimizer = get_state_dict(job.module, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optimizer": optimizer, "step": job.step, "extra": {"a": (1, 2), "t": torch.arange(3)}}


def set_state_dict_of(job: Job, state: dict[str, Any], *, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        job.module, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    job.step = state["step"]


def apart(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs, but the states that DCP makes for parameters without a gradient, and the schedule."""
    problems = differences({**expected, "scheduler": 0}, {**found, "scheduler": 0})
    return [each for each in problems if not each.startswith("unused.") or "only in" not in each]
