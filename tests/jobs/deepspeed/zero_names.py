"""Layouts of the matrix of ZeRO stages. Does not import DeepSpeed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

WORLDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Layout:
    """One layout of the matrix. ``precision`` is fp32, bf16, or bf16o (BF16_Optimizer: ZeRO-1, fp32 accumulation)."""

    stage: int
    world: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"z{self.stage}w{self.world}{self.precision}"

    @property
    def dtype(self) -> str:
        """The dtype of the weights in the model: fp32 or bf16. BF16_Optimizer rounds as ZeRO-1 does."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def trajectory(self) -> str:
        """A name that is equal for layouts whose uninterrupted runs differ by rounding alone.

        In bf16, stage 0 counts one optimizer step more from the start (``FP16_UnfusedOptimizer.initialize_optimizer_states``),
        and stage 3 draws its first weights in bf16 (``zero.Init``).
        """
        own = self.precision == "bf16" and self.stage in (0, 3)
        return f"bf16 stage {self.stage}" if own else "all others"


def layouts(world: int) -> list[Layout]:
    """Return the layouts of every stage and precision at one world size."""
    found = [Layout(stage, world, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
    return [*found, Layout(1, world, "bf16o")]


def pairs(full: bool) -> list[tuple[Layout, Layout]]:
    """Return the (source, target) pairs to load, target by target.

    All, or each layout into itself, each of the nine kinds of optimizer (stage and precision) into each other, each number of
    ranks into each other, and each kind from and into each number of ranks.
    """
    every = [list(enumerate(layouts(world))) for world in WORLDS]
    return [
        (source, target)
        for (v, targets), (w, sources) in itertools.product(enumerate(every), enumerate(every))
        for (j, target), (i, source) in itertools.product(targets, sources)
        if full or source == target or (i != j and w == j % 4 and v == (i + j) % 4)
    ]
