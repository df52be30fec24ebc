"""Layouts of Megatron-style tensor parallelism, alone and in pipelines. Does not import DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronLayout:
    """A layout of the matrix.

    Attributes:
        tensor, stages, data: number of tensor-parallel ranks, of pipeline stages (0 for a plain module), and of
            data-parallel ranks.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
        sequence: number of sequence-parallel ranks. They train on rows, not on parts of a sequence.
    """

    tensor: int
    stages: int
    data: int
    stage: int
    precision: str = "fp32"
    sequence: int = 1

    @property
    def world(self) -> int:
        return self.tensor * max(self.stages, 1) * self.data * self.sequence

    @property
    def name(self) -> str:
        sequence = f"sp{self.sequence}" if self.sequence > 1 else ""
        return f"{sequence}tp{self.tensor}pp{self.stages}dp{self.data}z{self.stage}{self.precision}"


CHOSEN = [
    MegatronLayout(2, 2, 1, 1, "bf16"),
    MegatronLayout(1, 0, 2, 3),
    MegatronLayout(2, 0, 2, 2),
    MegatronLayout(4, 0, 1, 0),
    MegatronLayout(1, 2, 2, 1),
]


def pairs() -> list[tuple[MegatronLayout, MegatronLayout]]:
    """Return the (source, target) pairs to load: each layout into the next one, and one into itself."""
    return [(CHOSEN[0], CHOSEN[0]), *((source, CHOSEN[(at + 1) % len(CHOSEN)]) for at, source in enumerate(CHOSEN))]


AVERAGED = [*CHOSEN, MegatronLayout(2, 0, 2, 3), MegatronLayout(2, 0, 1, 1, "bf16o"), MegatronLayout(4, 0, 1, 1, "bf16")]


def averaged_pairs() -> list[tuple[MegatronLayout, MegatronLayout]]:
    """Return the pairs to load with parameters to average: each layout into each."""
    return [(source, target) for source in AVERAGED for target in AVERAGED]


SEQUENCE = [
    MegatronLayout(2, 0, 1, 1, "fp32", 2),
    MegatronLayout(1, 0, 1, 2, "bf16", 2),
    MegatronLayout(2, 0, 1, 0, "fp32", 2),
    MegatronLayout(2, 0, 1, 1, "bf16o", 2),
    MegatronLayout(2, 2, 1, 1),
    MegatronLayout(1, 0, 1, 1),
]


def sequence_pairs() -> list[tuple[MegatronLayout, MegatronLayout]]:
    """Return the pairs to load with sequence parallelism: each layout into each."""
    return [(source, target) for source in SEQUENCE for target in SEQUENCE]
