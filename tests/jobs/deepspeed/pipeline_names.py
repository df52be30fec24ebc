"""Layouts of the matrix of pipelines. Does not import DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineLayout:
    """A layout of the matrix. ``stages`` is 0 for a plain module. ``precision`` is that of ``jobs.Layout``."""

    stages: int
    data: int
    stage: int
    precision: str = "fp32"
    partition: str = "parameters"

    @property
    def world(self) -> int:
        return max(self.stages, 1) * self.data

    @property
    def name(self) -> str:
        return f"{f'pp{self.stages}' if self.stages else 'plain'}dp{self.data}z{self.stage}{self.precision}"


_DEGREES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1))
_KINDS = ((0, "fp32"), (1, "fp32"), (0, "bf16"), (1, "bf16"), (1, "bf16o"))
FULL = [
    *(PipelineLayout(stages, data, stage, precision, "uniform" if stages == 3 else "parameters")
      for stages, data in _DEGREES for stage, precision in _KINDS),
    *(PipelineLayout(0, data, stage, precision) for data in (1, 2) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
]  # fmt: skip
CHOSEN = [
    PipelineLayout(2, 1, 0),
    PipelineLayout(2, 1, 1, "bf16"),
    PipelineLayout(0, 2, 3),
    PipelineLayout(2, 2, 1),
    PipelineLayout(4, 1, 1, "bf16o"),
    PipelineLayout(1, 2, 1),
    PipelineLayout(2, 2, 0, "bf16"),
    PipelineLayout(0, 2, 2, "bf16"),
]


def pairs(full: bool) -> list[tuple[PipelineLayout, PipelineLayout]]:
    """Return the (source, target) pairs to load: all, or each layout into itself and into the next one."""
    if full:
        return [(source, target) for source in FULL for target in FULL]
    count = len(CHOSEN)
    return [(CHOSEN[at], CHOSEN[(at + by) % count]) for at in range(count) for by in (0, 1)]
