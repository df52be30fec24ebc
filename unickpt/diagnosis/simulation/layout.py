"""Ranks and communicators of a job with tensor, pipeline and data parallelism, in Megatron's order of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORLD = 0  # number of the communicator of all ranks


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. A host has the ranks of a tensor parallel group.

    Attributes:
        tp, pp, dp: tensor, pipeline, data parallel.
    """

    tp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, stage: int, replica: int, tensor: int) -> int:
        return tensor + self.tp * (replica + self.dp * stage)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, replica, and rank in the tensor parallel group."""
        rest, tensor = divmod(rank, self.tp)
        stage, replica = divmod(rest, self.dp)
        return stage, replica, tensor

    def tensor_group(self, stage: int, replica: int) -> int:
        return 1 + stage * self.dp + replica

    def data_group(self, stage: int, tensor: int) -> int:
        return 1 + self.pp * self.dp + stage * self.tp + tensor

    def pipeline_group(self, replica: int, tensor: int) -> int:
        return 1 + self.pp * (self.dp + self.tp) + replica * self.tp + tensor

    def members(self) -> dict[int, npt.NDArray[np.int64]]:
        """Ranks of every communicator."""
        ranks = np.arange(self.world).reshape(self.pp, self.dp, self.tp)
        found = {WORLD: ranks.ravel()}
        found |= {self.tensor_group(p, d): ranks[p, d] for p in range(self.pp) for d in range(self.dp)}
        found |= {self.data_group(p, t): ranks[p, :, t] for p in range(self.pp) for t in range(self.tp)}
        return found | {self.pipeline_group(d, t): ranks[:, d, t] for d in range(self.dp) for t in range(self.tp)}

    def names(self) -> dict[int, str]:
        """Of every communicator, as ``unickpt diagnose`` would name it."""
        kinds = [("world", 1), ("tensor parallel", self.pp * self.dp), ("data parallel", self.pp * self.tp)]
        kinds.append(("pipeline parallel", self.dp * self.tp))
        labels = [label for label, count in kinds for _ in range(count)]
        members = self.members()
        return {number: f"the {label} group of rank {members[number][0]}" for number, label in enumerate(labels)}

    def hosts(self) -> npt.NDArray[np.int64]:
        """Number of its host, of every rank."""
        return np.arange(self.world) // self.tp
