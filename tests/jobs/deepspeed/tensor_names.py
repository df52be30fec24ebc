"""Layouts of the matrix of tensor parallelism (AutoTP). Does not import DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorLayout:
    """A layout of the matrix.

    Attributes:
        tensor, data: number of tensor-parallel and of data-parallel ranks.
        stage: ZeRO stage.
        precision: that of ``jobs.Layout``.
        vocabulary: how the tied embedding and head are divided: ``whole``, ``rows`` (vocabulary) or ``columns`` (hidden).
    """

    tensor: int
    data: int
    stage: int
    precision: str = "fp32"
    vocabulary: str = "rows"

    @property
    def world(self) -> int:
        return self.tensor * self.data

    @property
    def name(self) -> str:
        return f"tp{self.tensor}dp{self.data}z{self.stage}{self.precision}{self.vocabulary}"


_DEGREES = ((1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (4, 1))
_KINDS = (
    (0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "bf16o"),
)  # fmt: skip
_VOCABULARY = ("rows", "columns", "whole")
FULL = [
    TensorLayout(tensor, data, stage, precision, _VOCABULARY[(a + b) % 3])
    for a, (tensor, data) in enumerate(_DEGREES)
    for b, (stage, precision) in enumerate(_KINDS)
]
CHOSEN = [
    TensorLayout(2, 2, 1, "bf16", "rows"),
    TensorLayout(4, 1, 2, "fp32", "columns"),
    TensorLayout(1, 2, 3, "fp32", "whole"),
    TensorLayout(2, 1, 0, "fp32", "columns"),
    TensorLayout(3, 1, 1, "fp32", "rows"),
    TensorLayout(2, 2, 3, "fp32", "rows"),
]


def pairs(full: bool) -> list[tuple[TensorLayout, TensorLayout]]:
    """Return the (source, target) pairs to load: all, or each layout into one or two others, and one into itself."""
    if full:
        return [(source, target) for source in FULL for target in FULL]
    count = len(CHOSEN)
    onward = [(CHOSEN[at], CHOSEN[(at + 1) % count]) for at in range(count)]
    more = [(CHOSEN[at], CHOSEN[at + 3]) for at in range(3)]
    return [*onward, *more, (CHOSEN[5], CHOSEN[5])]
