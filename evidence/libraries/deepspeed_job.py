"""A job of a library on top of DeepSpeed: trains small models, and saves or loads them by the library's own calls.

With ``UNICKPT_AUTOLOAD=0`` no hook of unickpt is installed, as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evidence.libraries.trials import Result, Task, noted
from tests.jobs.deepspeed.truth import Truth, consolidated, differences
from unickpt.testing.launch import leave

STEPS = (3, 2)  # before the save, and after the save or the load
ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Trained:
    """A model of the job.

    Attributes:
        engine: its engine of DeepSpeed.
        step: makes the optimizer step of a number, and returns the loss of this rank.
    """

    engine: Any
    step: Callable[[int], float]


Models = dict[str, Trained]
Call = Callable[[Models, Task], Mapping[str, Any] | None]


def run(task: Task, make: Callable[[Task, int], Models], save: Call, load: Call) -> None:
    """Do a task in this rank of a job of torchrun, and end the process.

    Args:
        task: what to do. Its layout is in the words of ``make``.
        make: makes the models of the job, by name, from the task and a seed.
        save: saves the models in ``task.folder`` by the library. What it returns is noted in the result.
        load: the same for a load.
    """

    def work() -> Result:
        models = make(task, 7 if task.loads else 1)
        return (_loaded if task.loads else _saved)(models, task, load if task.loads else save)

    noted(task, work)
    dist.barrier()
    leave()


def _saved(models: Models, task: Task, save: Call) -> Result:
    _trained(models, range(STEPS[0]))
    seen = save(models, task)
    for name, model in models.items():
        state = gathered(model.engine)
        if dist.get_rank() == 0:
            torch.save(state, Path(task.notes) / f"{name}.pt")
    return Result(losses=_trained(models, _after()), seen=seen or {})


def _loaded(models: Models, task: Task, load: Call) -> Result:
    seen = load(models, task)
    problems = []
    for name, model in models.items():
        state = torch.load(Path(task.notes) / f"{name}.pt", weights_only=False)
        problems += [f"{name}: {each}" for each in differences(state, gathered(model.engine))]
    return Result(losses=_trained(models, _after()), problems=problems, seen=seen or {})


def gathered(engine: Any) -> Truth:
    """Return the state of an engine through DeepSpeed's accessors, without buffers that the model makes itself.

    DeepSpeed links its accessors to the moments once, after the step of its first parameter group. The others have none yet.
    """
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        engine.optimizer._hp_optimizer_states_linked = False
        link()
    own = {
        f"buffer/{prefix}{name}"
        for prefix, module in ((f"{path}." if path else "", module) for path, module in engine.module.named_modules())
        for name in module._non_persistent_buffers_set
    }
    return {key: value for key, value in consolidated(engine, ADAM).items() if key not in own}


def _after() -> range:
    return range(STEPS[0], sum(STEPS))


def _trained(models: Models, steps: range) -> list[float]:
    """Train the models, and return their losses over all ranks."""
    return [_mean(model.step(step)) for step in steps for model in models.values()]


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
