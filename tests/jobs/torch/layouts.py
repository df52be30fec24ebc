"""Layouts of jobs in plain torch, and the pairs to test. Imports nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

# shape-precision-optimizer. A mesh is the sizes of its dimensions: replicas x shards, or shards x tensor-parallel ranks
NAMES = (
    "one-fp32-adamw", "ddp2-fp32-adamw", "ddp4-fp32-adamw", "fsdp1-fp32-adamw", "fsdp2-fp32-adamw", "fsdp3-fp32-adamw",
    "fsdp4-fp32-adamw", "hsdp2x2-fp32-adamw", "tp2-fp32-adamw", "fsdp2xtp2-fp32-adamw",
    "one-bf16-adamw", "fsdp2-bf16-adamw", "fsdp4-bf16-adamw", "hsdp2x2-bf16-adamw", "fsdp2xtp2-bf16-adamw",
    "fsdp2-mixed-adamw", "fsdp3-mixed-adamw", "hsdp2x2-mixed-adamw",
    "fsdp2-fp32-fused", "fsdp4-fp32-fused",
    "fsdp2-fp32-sgd", "hsdp2x2-fp32-sgd",
    "one-fp32-muon", "fsdp2-fp32-muon",
)  # fmt: skip
_EVERY = 3


@dataclass(frozen=True)
class Layout:
    """A layout.

    Attributes:
        shape: ``one``, ``ddpN``, ``fsdpN``, ``hsdpRxS``, ``tpN`` or ``fsdpSxtpN``.
        precision: dtype of the parameters; ``mixed``: fp32 parameters that compute in bf16.
        optimizer: ``adamw``, ``fused``, ``sgd``, ``muon`` (with AdamW for what is no matrix).
    """

    shape: str
    precision: str
    optimizer: str

    @classmethod
    def parse(cls, name: str) -> Layout:
        return cls(*name.split("-"))

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.precision}-{self.optimizer}"

    @property
    def kind(self) -> str:
        """Letters of the shape: ``one``, ``ddp``, ``fsdp``, ``hsdp``, ``tp``, ``fsdpxtp``."""
        return "".join(letter for letter in self.shape if letter.isalpha()).replace("hsdpx", "hsdp")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions of the mesh."""
        digits = "".join(letter if letter.isdigit() else " " for letter in self.shape).split()
        return tuple(map(int, digits)) or (1,)

    @property
    def world(self) -> int:
        found = 1
        for size in self.sizes:
            found *= size
        return found

    @property
    def dtype(self) -> str:
        """What a measure of rounding tells apart."""
        return self.precision

    @property
    def trajectory(self) -> str:
        """Losses of layouts of one trajectory differ by rounding alone."""
        return self.family

    @property
    def family(self) -> str:
        """Optimizers of one family load each other's states."""
        return "adamw" if self.optimizer == "fused" else self.optimizer


def pairs(full: bool) -> list[tuple[Layout, Layout]]:
    """Return all pairs of layouts whose optimizers have the same states; of these, every third one that CI takes."""
    layouts = [Layout.parse(name) for name in NAMES]
    every = [(a, b) for a in layouts for b in layouts if a.family == b.family]
    return every if full else every[::_EVERY]
