"""Layouts of the matrix of expert parallelism. Does not import DeepSpeed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tests.jobs.sizes import size_of

HAS_AUTOTP = (Path(importlib.util.find_spec("deepspeed").origin).parent / "checkpoint" / "affine.py").exists()  # from 0.19 on
EXPERTS = (size_of("FIRST_EXPERTS", 4), size_of("SECOND_EXPERTS", 6))  # of the two expert layers of the model


@dataclass(frozen=True)
class ExpertLayout:
    """A layout of the matrix.

    Attributes:
        expert, world: number of expert-parallel ranks, and of all ranks.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
        sequence: number of sequence-parallel ranks (``mpu``). They train on rows, not on parts of a sequence.
        tensor: number of tensor-parallel ranks (AutoTP).
        experts: what the tensor-parallel ranks have: ``spread`` (they count as expert-parallel ranks too), or with
            ``enable_expert_tensor_parallelism`` ``whole`` experts or ``divided`` ones.
    """

    expert: int
    world: int
    stage: int
    precision: str = "fp32"
    sequence: int = 1
    tensor: int = 1
    experts: str = "spread"

    @property
    def degrees(self) -> tuple[int, int]:
        """Expert-parallel ranks of each layer. They divide its experts, so 3 are 1 and 3, and 4 are 4 and 2."""
        return (1 if self.expert == 3 else self.expert, 2 if self.expert == 4 else self.expert)

    @property
    def name(self) -> str:
        more = (f"sp{self.sequence}" if self.sequence > 1 else "") + (
            f"tp{self.tensor}{self.experts}" if self.tensor > 1 else ""
        )
        return f"{more}ep{self.expert}w{self.world}z{self.stage}{self.precision}"


_DEGREES = ((1, 1), (1, 2), (2, 2), (1, 3), (3, 3), (1, 4), (2, 4), (4, 4))
_KINDS = ((0, "fp32"), (1, "fp32"), (2, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (1, "bf16o"))
FULL = [ExpertLayout(expert, world, stage, precision) for expert, world in _DEGREES for stage, precision in _KINDS]
CHOSEN = [
    ExpertLayout(4, 4, 1),
    ExpertLayout(2, 4, 2, "bf16"),
    ExpertLayout(1, 1, 0),
    ExpertLayout(2, 2, 0, "bf16"),
    ExpertLayout(3, 3, 2),
    ExpertLayout(1, 2, 1, "bf16o"),
    ExpertLayout(2, 4, 0),
    ExpertLayout(4, 4, 1, "bf16o"),
    *([ExpertLayout(2, 4, 1, tensor=2), ExpertLayout(2, 4, 1, tensor=2, experts="divided")] if HAS_AUTOTP else ()),
]


def pairs(full: bool) -> list[tuple[ExpertLayout, ExpertLayout]]:
    """Return the (source, target) pairs to load: all, or each layout into the next one, and some into themselves."""
    if full:
        return [(source, target) for source in FULL for target in FULL]
    count = len(CHOSEN)
    onward = [(CHOSEN[at], CHOSEN[(at + 1) % count]) for at in range(count)]
    return [*onward, *((CHOSEN[at], CHOSEN[at]) for at in (0, 1, 4, 6))]


SEQUENCE = [
    ExpertLayout(2, 4, 1, "fp32", 2),
    ExpertLayout(4, 4, 2, "bf16", 2),
    ExpertLayout(1, 2, 0, "fp32", 2),
    ExpertLayout(2, 4, 1, "bf16o", 4),
    ExpertLayout(2, 2, 1),
    ExpertLayout(1, 1, 0),
]


def sequence_pairs() -> list[tuple[ExpertLayout, ExpertLayout]]:
    """Return the pairs to load with sequence parallelism: each layout into each."""
    return [(source, target) for source in SEQUENCE for target in SEQUENCE]


TENSOR = [
    ExpertLayout(2, 4, 1, tensor=2),
    ExpertLayout(4, 4, 2, "bf16", tensor=2),
    ExpertLayout(1, 2, 0, tensor=2),
    ExpertLayout(2, 4, 0, "bf16", tensor=4),
    ExpertLayout(2, 4, 1, "bf16o", tensor=2),
    ExpertLayout(3, 3, 2, tensor=3),
    ExpertLayout(2, 4, 1, tensor=2, experts="whole"),
    ExpertLayout(2, 4, 2, "bf16", tensor=2, experts="divided"),
    ExpertLayout(1, 4, 0, tensor=2, experts="divided"),
    ExpertLayout(1, 2, 1, "bf16o", tensor=2, experts="divided"),
    ExpertLayout(2, 2, 1),
    ExpertLayout(1, 1, 0),
]


def tensor_pairs() -> list[tuple[ExpertLayout, ExpertLayout]]:
    """Return the pairs to load with AutoTP: each layout into each."""
    return [(source, target) for source in TENSOR for target in TENSOR]


@dataclass(frozen=True)
class PipedExpertLayout:
    """A layout of pipelines with experts.

    Attributes:
        stages: number of pipeline stages; 0 for a plain module.
        expert, data: number of expert-parallel and of data-parallel ranks of a stage. The first divides the second.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
    """

    stages: int
    expert: int
    data: int
    stage: int
    precision: str = "fp32"

    @property
    def world(self) -> int:
        return max(self.stages, 1) * self.data

    @property
    def name(self) -> str:
        return f"pp{self.stages}ep{self.expert}dp{self.data}z{self.stage}{self.precision}"


PIPED = [
    PipedExpertLayout(2, 2, 2, 1),
    PipedExpertLayout(1, 1, 2, 0),
    PipedExpertLayout(0, 2, 2, 2),
    PipedExpertLayout(2, 2, 2, 1, "bf16o"),
    PipedExpertLayout(2, 1, 2, 0),
    PipedExpertLayout(1, 2, 2, 1, "bf16"),
    PipedExpertLayout(0, 1, 1, 1, "bf16"),
    PipedExpertLayout(2, 1, 1, 1),
]


def piped_pairs() -> list[tuple[PipedExpertLayout, PipedExpertLayout]]:
    """Return the (source, target) pairs to load: each layout into each."""
    return [(source, target) for source in PIPED for target in PIPED]
