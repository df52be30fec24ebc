"""How far a training and its learning-rate schedule are, in terms that frameworks share: steps and samples.

Frameworks count the same progress in their own ways: DeepSpeed's schedulers and torch's count optimizer steps, Megatron's
counts samples. A count is carried over where it means the same. The form of a schedule (peak, warmup, decay) is never: it
belongs to the job, and no framework stores it in another one's terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["steps", "samples"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is.

    Attributes:
        steps: iterations; of a schedule, those in which the optimizer stepped.
        samples: sequences that they were made of; None: nobody has counted.
    """

    steps: int
    samples: int | None = None

    def with_batch(self, batch: int) -> Progress:
        """Where nobody has counted, as many samples as steps of this batch have: what both frameworks assume then.

        (``checkpoint.get("global_samples", global_steps * train_batch_size())`` in DeepSpeed's ``runtime/engine.py``,
        ``consumed_train_samples = iteration * global_batch_size`` in Megatron-LM's ``training/training.py``.)
        """
        return self if self.samples is not None else Progress(self.steps, self.steps * batch)

    def up_to(self, steps: int) -> Progress:
        """Some of the steps, with their share of the samples: exact if all steps had the same batch."""
        if self.samples is None or not self.steps:
            return Progress(steps, self.samples if steps == self.steps else None)
        return Progress(steps, self.samples * steps // self.steps)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the state of a scheduler counts.

    Attributes:
        unit: of the count.
        key: of the state, that holds it.
        first: its value before the first step.
        others: further keys that go up with it, and their values before the first step.
    """

    unit: Unit
    key: str
    first: int
    others: Mapping[str, int] = field(default_factory=dict)


_DEEPSPEED = Meaning("steps", "last_batch_iteration", -1)
SCHEDULERS: Mapping[str, Meaning] = {
    # deepspeed/runtime/lr_schedules.py: ``step`` is called once per optimizer step, and first makes a 0 of the -1
    "WarmupLR": _DEEPSPEED,
    "WarmupDecayLR": _DEEPSPEED,
    "WarmupCosineLR": _DEEPSPEED,
    "LRRangeTest": _DEEPSPEED,
    "OneCycle": _DEEPSPEED,
    # torch/optim/lr_scheduler.py: a function of the epoch alone, so that it can begin anywhere. Trainer's are of this class,
    # and DeepSpeed calls ``step`` once per optimizer step. Schedulers that change the rate of the step before cannot.
    "LambdaLR": Meaning("steps", "last_epoch", 0, {"_step_count": 1}),
    # megatron/core/optimizer_param_scheduler.py: ``step(increment)`` with the samples of an iteration
    "OptimizerParamScheduler": Meaning("samples", "num_steps", 0),
}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def counted(kind: str, state: Mapping[str, Any], job: Progress) -> Progress | None:
    """How far a schedule is by its scheduler's own state.

    Args:
        kind: class of the scheduler.
        state: its ``state_dict``.
        job: how far the job is; says how many samples a step has.

    Returns:
        None if it is not known what the scheduler counts.
    """
    meaning = SCHEDULERS.get(kind)
    value = state.get(meaning.key) if meaning is not None else None
    found = _count(value - meaning.first) if meaning is not None and type(value) is int else None
    if meaning is None or found is None:
        return None
    if meaning.unit == "steps":
        return job.up_to(found)
    if job.samples:
        return Progress(job.steps * found // job.samples, found)
    return Progress(job.steps, found)


def state_at(kind: str, state: Mapping[str, Any], progress: Progress) -> dict[str, Any] | None:
    """A scheduler's state, moved.

    Args:
        kind: class of the scheduler.
        state: its ``state_dict``; all but what it counts stays.
        progress: of the schedule. One step less than none is what a scheduler has before it takes its first.

    Returns:
        None if it is not known what the scheduler counts, or if nobody has counted that.
    """
    meaning = SCHEDULERS.get(kind)
    if meaning is None or meaning.key not in state:
        return None
    done = progress.steps if meaning.unit == "steps" else progress.samples
    if done is None:
        return None
    moved = {key: first + done for key, first in {meaning.key: meaning.first, **meaning.others}.items() if key in state}
    return {**state, **moved}


# ---------------------------------------------------------------- what frameworks store


def of_job(step: int, objects: Mapping[str, Any]) -> Progress:
    """How far the job that wrote a checkpoint was.

    Args:
        step: of the manifest.
        objects: the checkpoint's non-tensor state, decoded: ``engine`` of a DeepSpeed job (``ds_unickpt.capture``), ``common``
            of a Megatron one (Megatron's own common state dict, and its arguments in it).
    """
    engine, common = objects.get("engine"), objects.get("common")
    samples = None
    if isinstance(engine, Mapping):
        samples = _count(engine.get("global_samples"))
    elif isinstance(common, Mapping):
        samples = _count(getattr(common.get("args"), "consumed_train_samples", None))
        if samples is None:  # saved by megatron-core without the scripts
            samples = _count(_megatrons(common).get("num_steps"))
    return Progress(step, None if not samples and step else samples)  # a counter that nobody has kept is 0


def of_schedule(step: int, objects: Mapping[str, Any]) -> Progress:
    """How far the learning-rate schedule of the job that wrote a checkpoint was: steps that were skipped do not count.

    Args:
        step, objects: as ``of_job`` has them.
    """
    job = of_job(step, objects)
    engine, common, saved = objects.get("engine"), objects.get("common"), objects.get("lr_scheduler")
    if isinstance(common, Mapping):
        return counted("OptimizerParamScheduler", _megatrons(common), job) or job
    if isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping):
        found = counted(str(saved.get("class")), saved["state"], job)
        if found is not None:
            return found
    skipped = _count(engine.get("skipped_steps")) if isinstance(engine, Mapping) else None
    return job.up_to(max(step - skipped, 0)) if skipped else job


def _megatrons(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of Megatron's scheduler: the scripts store ``opt_param_scheduler``, ``megatron_unickpt.save`` stores ``scheduler``."""
    found = common.get("opt_param_scheduler", common.get("scheduler"))
    return found if isinstance(found, Mapping) and "lr_decay_style" in found else {}
