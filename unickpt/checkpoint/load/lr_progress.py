"""Progress of a training and of its learning-rate schedule, in steps and samples.

Schedulers of frameworks count either optimizer steps or samples. A load converts the counter of one scheduler into that of
another. It does not convert the form of a schedule (peak, warmup, decay), which belongs to the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ProgressUnit = Literal["steps", "samples"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a job or of a schedule.

    Attributes:
        steps: iterations; of a schedule, those in which the optimizer stepped.
        samples: sequences in these steps; None if unknown.
    """

    steps: int
    samples: int | None = None

    def with_batch(self, batch: int) -> Progress:
        """Return the progress with the samples of all steps, if they are unknown, for one global batch size.

        Both frameworks assume the same: ``checkpoint.get("global_samples", global_steps * train_batch_size())`` in DeepSpeed's
        ``runtime/engine.py``, ``consumed_train_samples = iteration * global_batch_size`` in Megatron-LM's
        ``training/training.py``.
        """
        return self if self.samples is not None else Progress(self.steps, self.steps * batch)

    def up_to(self, steps: int) -> Progress:
        """Return the progress after some of the steps. Samples are exact if all steps had the same batch size."""
        if self.samples is None or not self.steps:
            return Progress(steps, self.samples if steps == self.steps else None)
        return Progress(steps, self.samples * steps // self.steps)


@dataclass(frozen=True, slots=True)
class CountedProgress:
    """The counter in the state of a learning-rate scheduler.

    Attributes:
        unit: of the counter.
        key: of the counter in the state.
        first: value before the first step.
        others: further keys that increase with it, and their values before the first step.
    """

    unit: ProgressUnit
    key: str
    first: int
    others: Mapping[str, int] = field(default_factory=dict)


# A function of the epoch alone (torch/optim/lr_scheduler.py), so the schedule can begin at any step. transformers' Trainer uses
# it, and DeepSpeed calls ``step`` once per optimizer step. torch's schedulers that change the previous rate cannot be moved.
LAMBDA_LR = CountedProgress("steps", "last_epoch", 0, {"_step_count": 1})


def count_of(value: Any) -> int | None:
    """Return a stored counter, or None if the value is no plausible one."""
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def counted(meaning: CountedProgress | None, state: Mapping[str, Any], job: Progress) -> Progress | None:
    """Return the progress of a schedule by the state of its scheduler; None if its class is unknown or it has no valid count.

    ``job``: progress of the job, for the number of samples in a step.
    """
    value = state.get(meaning.key) if meaning is not None else None
    found = count_of(value - meaning.first) if meaning is not None and type(value) is int else None
    if meaning is None or found is None:
        return None
    if meaning.unit == "steps":
        return job.up_to(found)
    if job.samples:
        return Progress(job.steps * found // job.samples, found)
    return Progress(job.steps, found)


def state_at(meaning: CountedProgress | None, state: Mapping[str, Any], progress: Progress) -> dict[str, Any] | None:
    """Return the state of a scheduler after some progress, in which only the counters change.

    None if its class is unknown, or if the progress does not have the unit that it counts. A scheduler before its first step
    has one step less than none.
    """
    if meaning is None or meaning.key not in state:
        return None
    done = progress.steps if meaning.unit == "steps" else progress.samples
    if done is None:
        return None
    moved = {key: first + done for key, first in {meaning.key: meaning.first, **meaning.others}.items() if key in state}
    return {**state, **moved}
