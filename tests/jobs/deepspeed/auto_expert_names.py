"""Layouts of the matrix of AutoEP. Does not import DeepSpeed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

EXPERTS = 4  # of each layer
HAS_AUTO_EP = (Path(importlib.util.find_spec("deepspeed").origin).parent / "module_inject" / "auto_ep.py").exists()


@dataclass(frozen=True)
class AutoExpertLayout:
    """A layout of the matrix.

    Attributes:
        expert, world: number of expert-parallel ranks, and of all ranks. No expert-parallel rank: the plain model, without
            AutoEP.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
        tensor: number of tensor-parallel ranks (AutoTP). AutoEP counts them among the expert-parallel ranks.
        sequence: number of sequence-parallel ranks (``mpu``). They train on rows, not on parts of a sequence.
    """

    expert: int
    world: int
    stage: int
    precision: str = "fp32"
    tensor: int = 1
    sequence: int = 1

    @property
    def name(self) -> str:
        sequence, tensor = f"sp{self.sequence}" if self.sequence > 1 else "", f"tp{self.tensor}" if self.tensor > 1 else ""
        return f"{sequence}{tensor}aep{self.expert}w{self.world}z{self.stage}{self.precision}"


_DEGREES = ((0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 4))
_KINDS = tuple((stage, precision) for precision in ("fp32", "bf16") for stage in range(4))
FULL = [AutoExpertLayout(expert, world, stage, precision) for expert, world in _DEGREES for stage, precision in _KINDS]
CHOSEN = [
    AutoExpertLayout(2, 4, 3),
    AutoExpertLayout(4, 4, 1),
    AutoExpertLayout(1, 2, 2, "bf16"),
    AutoExpertLayout(0, 2, 3),
    AutoExpertLayout(2, 2, 0),
    AutoExpertLayout(2, 4, 1, "bf16"),
    AutoExpertLayout(2, 2, 3, "bf16"),
    AutoExpertLayout(2, 4, 1, "fp32", 2),
    AutoExpertLayout(4, 4, 2, "bf16", 2),
]


def pairs(full: bool) -> list[tuple[AutoExpertLayout, AutoExpertLayout]]:
    """Return the (source, target) pairs to load: all, or each layout into the next one, and some into themselves."""
    if full:
        return [(source, target) for source in FULL for target in FULL]
    count = len(CHOSEN)
    onward = [(CHOSEN[at], CHOSEN[(at + 1) % count]) for at in range(count)]
    return [*onward, *((CHOSEN[at], CHOSEN[at]) for at in (0, 1))]


TENSOR = [
    AutoExpertLayout(2, 4, 1, "fp32", 2),
    AutoExpertLayout(4, 4, 2, "bf16", 2),
    AutoExpertLayout(2, 2, 0, "fp32", 2),
    AutoExpertLayout(2, 4, 3, "fp32", 2),
    AutoExpertLayout(2, 4, 3, "bf16", 2),
    AutoExpertLayout(4, 4, 0, "fp32", 4),
    AutoExpertLayout(2, 4, 1),
    AutoExpertLayout(0, 2, 3),
]


def tensor_pairs() -> list[tuple[AutoExpertLayout, AutoExpertLayout]]:
    """Return the pairs to load with AutoTP: each layout into each."""
    return [(source, target) for source in TENSOR for target in TENSOR]


SEQUENCE = [
    AutoExpertLayout(2, 4, 1, "fp32", 1, 2),
    AutoExpertLayout(4, 4, 2, "fp32", 1, 2),
    AutoExpertLayout(2, 4, 0, "bf16", 1, 4),
    AutoExpertLayout(2, 4, 3),
    AutoExpertLayout(0, 2, 2),
]


def sequence_pairs() -> list[tuple[AutoExpertLayout, AutoExpertLayout]]:
    """Return the pairs to load with sequence parallelism: each layout into each."""
    return [(source, target) for source in SEQUENCE for target in SEQUENCE]
