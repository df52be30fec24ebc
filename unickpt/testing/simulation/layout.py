"""Ranks and communicators of a job with tensor, pipeline and data parallelism, in Megatron's rank order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.recording.rank_ranges import Progressions, progressions
from unickpt.diagnosis.snapshot.snapshot import GroupInfo

WORLD = 0  # number of the communicator of all ranks


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism. Each host has the ranks of one tensor parallel group.

    Attributes:
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        dp: data parallel degree.

    Example:
        >>> ParallelLayout(tp=2, pp=4, dp=8).place(63)
        (3, 7, 1)
    """

    tp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def rank(self, stage: int, replica: int, tensor: int) -> int:
        """Return the global rank at a place."""
        return tensor + self.tp * (replica + self.dp * stage)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return stage, replica, and rank in the tensor parallel group."""
        rest, tensor = divmod(rank, self.tp)
        stage, replica = divmod(rest, self.dp)
        return stage, replica, tensor

    def tensor_group(self, stage: int, replica: int) -> int:
        """Return the number of a tensor parallel communicator."""
        return 1 + stage * self.dp + replica

    def data_group(self, stage: int, tensor: int) -> int:
        """Return the number of a data parallel communicator."""
        return 1 + self.pp * self.dp + stage * self.tp + tensor

    def pipeline_group(self, replica: int, tensor: int) -> int:
        """Return the number of a pipeline parallel communicator."""
        return 1 + self.pp * (self.dp + self.tp) + replica * self.tp + tensor

    def members(self) -> dict[int, npt.NDArray[np.int64]]:
        """Return the global ranks of every communicator, by number."""
        ranks = np.arange(self.world).reshape(self.pp, self.dp, self.tp)
        found = {WORLD: ranks.ravel()}
        found |= {self.tensor_group(p, d): ranks[p, d] for p in range(self.pp) for d in range(self.dp)}
        found |= {self.data_group(p, t): ranks[p, :, t] for p in range(self.pp) for t in range(self.tp)}
        return found | {self.pipeline_group(d, t): ranks[:, d, t] for d in range(self.dp) for t in range(self.tp)}

    def groups(self) -> dict[int, GroupInfo]:
        """Return every communicator by number, with Megatron's name of its kind as label."""
        kinds = [("world", 1), ("tensor parallel", self.pp * self.dp), ("data parallel", self.pp * self.tp)]
        kinds.append(("pipeline parallel", self.dp * self.tp))
        labels = [label for label, count in kinds for _ in range(count)]
        members = self.members()
        return {
            number: GroupInfo(f"{label} {number}", label, _progressions(members[number].tolist()))
            for number, label in enumerate(labels)
        }

    def hosts(self) -> npt.NDArray[np.int64]:
        """Return the host number of every rank."""
        return np.arange(self.world) // self.tp


def _progressions(ranks: list[int]) -> Progressions:
    return tuple((first, step, count) for first, step, count in progressions(ranks))
