"""A job of a library on top of Megatron-core: trains a small GPT, and saves or loads it by the library's own calls.

With ``UNICKPT_AUTOLOAD=0`` no hook of unickpt is installed, as if it were not there.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job  # before anything of Megatron

import numpy
import torch
import torch.distributed as dist

from evidence.libraries.trials import Result, Task, noted
from megatron_unickpt.testing import truth
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron.compared import differences
from unickpt.base.switch import VARIABLE
from unickpt.testing.launch import leave

STEPS = (3, 2)  # before the save, and after the save or the load
Call = Callable[[dict[str, Job], Task], Any]
Make = Callable[[Layout, int], dict[str, Job]]


def run(task: Task, save: Call, load: Call, *, make: Make | None = None) -> None:
    """Do a task in this rank of a job of torchrun, and end the process.

    Args:
        task: what to do. Its layout is the name of a ``Layout``.
        save: saves the models in ``task.folder`` by the library. What it returns is noted in the result.
        load: the same for a load.
        make: makes the models of the job, by name, from a layout and a seed. Default: one model.
    """
    run_all([task], save, load, make=make)


def run_all(tasks: Sequence[Task], save: Call, load: Call, *, make: Make | None = None) -> None:
    """Do several tasks, one after the other, up to one that fails."""
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)  # Megatron saves the padding of its buffers: fills it
    for task in tasks:
        seed = 7 if task.loads else 1
        random.seed(seed)
        numpy.random.seed(seed)

        def work(task: Task = task, seed: int = seed) -> Result:
            jobs = (make or _one)(Layout.parse(task.layout), seed)
            return (_loaded if task.loads else _saved)(jobs, task, load if task.loads else save)

        noted(task, work)
        dist.barrier()
    truth.close()
    leave()


def scheduler_of(job: Job) -> Any:
    """Return a schedule of Megatron for the optimizer of a job."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    for group in job.optimizer.param_groups:
        group["min_lr"] = 0.0
    return OptimizerParamScheduler(job.optimizer, 0.0, 1e-2, 0.0, 0, 400, "cosine", 0.1, 0.1, 400, "constant")


def _one(layout: Layout, seed: int) -> dict[str, Job]:
    return {"model": Job(layout, seed=seed)}


def _saved(jobs: dict[str, Job], task: Task, save: Call) -> Result:
    for job in jobs.values():
        job.train(STEPS[0])
    seen = save(jobs, task)
    for name, job in jobs.items():
        _note(job, Path(task.notes) / name)
    return Result(losses=_trained(jobs), seen=seen or {})


def _loaded(jobs: dict[str, Job], task: Task, load: Call) -> Result:
    seen = load(jobs, task)
    problems = [f"{name}: {each}" for name, job in jobs.items() for each in _differences(job, Path(task.notes) / name)]
    for job in jobs.values():
        job.step = STEPS[0]
    return Result(losses=_trained(jobs), problems=problems, seen=seen or {})


def _trained(jobs: dict[str, Job]) -> list[float]:
    return [loss for job in jobs.values() for loss in job.train(STEPS[1])]


def _note(job: Job, place: Path) -> None:
    """Write the state of a model for the job that loads it."""
    state, groups = _gathered(job, place), _groups(job)
    if dist.get_rank() == 0:
        torch.save(state, place / "state.pt")
        (place / "groups.json").write_text(json.dumps(groups))


def _differences(job: Job, place: Path) -> list[str]:
    state, groups = _gathered(job, place / "found"), _groups(job)
    if state is None:
        return []
    known = json.loads((place / "groups.json").read_text())
    found = [f"settings and steps: {known} expected, {groups} found"] if known != groups else []
    return found + differences(torch.load(place / "state.pt"), state)


def _gathered(job: Job, folder: Path) -> truth.Truth | None:
    with switched("off"):
        return truth.consolidated(job, folder)


def _groups(job: Job) -> list[str]:
    """Return the different settings of parameter groups, with their steps, of all ranks, but not how experts are divided."""
    everyone: list[Any] = [None] * dist.get_world_size()
    groups = [{key: value for key, value in group.items() if key != "is_expert_parallel"} for group in job.hyperparameters()]
    dist.all_gather_object(everyone, [json.dumps(group, sort_keys=True, default=str) for group in groups])
    return sorted({group for own in everyone for group in own})


@contextmanager
def switched(value: str) -> Iterator[None]:
    """Have another value of the switch within this block."""
    before: Mapping[str, str] = {VARIABLE: os.environ.get(VARIABLE, "")}
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        os.environ.update(before)
