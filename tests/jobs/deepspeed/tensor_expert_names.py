"""Layouts of experts in tensor-parallel jobs (``mpu``). Does not import DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorExpertLayout:
    """A layout of the matrix.

    Attributes:
        tensor, stages, data: number of tensor-parallel ranks, of pipeline stages (0 for a plain module), and of data-parallel
            ranks.
        expert: number of expert-parallel ranks of the first layer with experts. The second one has at most 2.
        sliced: the tensor-parallel ranks divide each expert (``enable_expert_tensor_parallelism``). Otherwise they have whole
            experts, and count as expert-parallel ranks too.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
        sequence: number of sequence-parallel ranks. They train on rows, not on parts of a sequence.
    """

    tensor: int
    stages: int
    data: int
    expert: int
    sliced: bool
    stage: int
    precision: str = "fp32"
    sequence: int = 1

    @property
    def world(self) -> int:
        return self.tensor * max(self.stages, 1) * self.data * self.sequence

    @property
    def degrees(self) -> tuple[int, int]:
        """Expert-parallel ranks of each layer."""
        return self.expert, min(self.expert, 2)

    @property
    def name(self) -> str:
        how, sequence = "s" if self.sliced else "w", f"sp{self.sequence}" if self.sequence > 1 else ""
        return f"{sequence}tp{self.tensor}pp{self.stages}dp{self.data}ep{self.expert}{how}z{self.stage}{self.precision}"


EVERY = [
    TensorExpertLayout(2, 0, 2, 2, True, 1),
    TensorExpertLayout(2, 0, 2, 4, False, 2, "bf16"),
    TensorExpertLayout(1, 0, 2, 2, False, 1),
    TensorExpertLayout(2, 0, 2, 2, False, 1, "bf16o"),
    TensorExpertLayout(1, 0, 1, 1, False, 0),
    TensorExpertLayout(2, 0, 1, 2, False, 0),
    TensorExpertLayout(2, 0, 2, 1, True, 2),
    TensorExpertLayout(2, 2, 1, 1, True, 1),
    TensorExpertLayout(2, 2, 1, 2, False, 1),
    TensorExpertLayout(4, 0, 1, 1, True, 0, "bf16"),
    TensorExpertLayout(2, 0, 1, 1, True, 1, "fp32", 2),
    TensorExpertLayout(2, 0, 1, 4, False, 2, "bf16", 2),
]


def pairs(full: bool) -> list[tuple[TensorExpertLayout, TensorExpertLayout]]:
    """Return the (source, target) pairs to load: all, or each layout of the first ones into the next, and one into itself."""
    if full:
        return [(source, target) for source in EVERY for target in EVERY]
    chosen = EVERY[:5]
    return [(chosen[0], chosen[0]), *((source, chosen[(at + 1) % len(chosen)]) for at, source in enumerate(chosen))]
