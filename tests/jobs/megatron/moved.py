"""What rounding does to the losses of a Megatron job (``tests/support/rounding.py``)."""

from __future__ import annotations

from pathlib import Path

import megatron_unickpt
from megatron_unickpt.testing.jobs import Job
from tests.support.rounding import move_weights


def moved_losses(job: Job, checkpoint: Path, step: int, steps: int, *, seed: int = 1) -> list[float]:
    """Load a checkpoint of this layout, train with weights that move in the last place, and return the losses.

    The ranks that hold copies of a weight move it alike.

    Args:
        job: it continues with other weights.
        step: that of the checkpoint.
        steps: how many to train.
        seed: of the directions.
    """
    megatron_unickpt.load(checkpoint, job.chunks, job.optimizer)
    job.step = step

    def move(at: int) -> None:
        for number, chunk in enumerate(job.chunks):
            move_weights(chunk.parameters(), 1000 * seed + 100 * number + at)

    return job.train(steps, move)
