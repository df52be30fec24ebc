"""Learning-rate schedule for a grown model: the usual maximum, and a decay that ends earlier (LEMON, arXiv 2310.07999)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FILE = "schedule.json"
SHARE, WARMUP_SHARE, LEAST_RATIO = 0.5, 0.05, 0.1


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A schedule.

    Attributes:
        steps: steps of a training of the large model from scratch. The decay ends after half of them.
        first: step of the checkpoint, from which the schedule starts again.
    """

    steps: int
    first: int

    @property
    def decay_steps(self) -> int:
        return max(round(self.steps * SHARE), 1)

    @property
    def warmup_steps(self) -> int:
        return max(round(self.decay_steps * WARMUP_SHARE), 1)

    def as_json(self) -> dict[str, Any]:
        """Return the section ``scheduler`` of a DeepSpeed JSON, and arguments of Megatron, which counts from step 0."""
        end = self.first + self.decay_steps
        params = {"total_num_steps": self.decay_steps, "warmup_num_steps": self.warmup_steps, "cos_min_ratio": LEAST_RATIO}
        return {
            "deepspeed": {"scheduler": {"type": "WarmupCosineLR", "params": params}, "load_lr_scheduler_states": False},
            "megatron": [
                "--lr-decay-style",
                "cosine",
                "--lr-decay-iters",
                str(end),
                "--train-iters",
                str(end),
                "--override-opt_param-scheduler",
            ],
        }
