"""Parallel shapes of jobs, by name. Imports nothing of megatron."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Layout:
    """A parallel shape and an optimizer. ``dp`` counts data parallel ranks without context parallel ones.

    ``grouped``: the experts of a rank are one parameter (Megatron's ``GroupedMLP``).

    ``optimizer``: ``dist``, ``plain``, ``fp32``; ``fp32dist`` (``dist`` with fp32 weights); ``layers`` (layer-wise);
    ``offload``, ``fp32offload`` (``dist``, ``fp32`` with CPU offload); ``aware`` (``dist``, precision-aware, masters as
    remainders), ``muon``, ``normuon`` and ``soap`` (of NVIDIA's ``emerging_optimizers``).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    optimizer: str = "dist"
    moe: bool = False
    grouped: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def distributed(self) -> bool:
        """Whether the job has a ``DistributedOptimizer``."""
        return self.optimizer in ("dist", "offload", "aware", "fp32dist")

    @property
    def low(self) -> bool:
        """Whether the model is in bf16."""
        return not self.optimizer.startswith("fp32")

    @property
    def offloads(self) -> bool:
        """Whether the optimizer steps on copies in host memory."""
        return self.optimizer.endswith("offload")

    @property
    def name(self) -> str:
        short = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "dp": 1}
        shape = "".join(f"{key}{getattr(self, key)}" for key in short if getattr(self, key) != 1) or "one"
        return f"{'grouped' if self.grouped else 'moe' if self.moe else 'gpt'}-{shape}-{self.optimizer}"

    @classmethod
    def parse(cls, name: str) -> Layout:
        kind, shape, optimizer = name.split("-")
        known = {f.name for f in fields(cls)}
        sizes = {key: int(n) for key, n in re.findall(r"([a-z]+)(\d+)", shape) if key in known}
        return cls(**sizes, optimizer=optimizer, moe=kind != "gpt", grouped=kind == "grouped")
