"""Where a rank stands among the ranks of a job. Pure values: ``partitions.placement`` reads them from DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that store one replicated tensor, a part each.

    Attributes:
        ranks: their global ranks. Empty if this rank does not take part.
        own: global rank of this rank.
    """

    ranks: tuple[int, ...]
    own: int

    @property
    def rank(self) -> int:
        """Position of this rank among the ranks that store a part; -1 if this rank stores none."""
        return self.ranks.index(self.own) if self.own in self.ranks else -1

    @property
    def world(self) -> int:
        """Number of ranks that store a part."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank stands among the ranks of the job.

    Attributes:
        rank: global rank.
        world: number of ranks of the job.
        stage, stages: pipeline stage of this rank, and number of stages. ``0`` and ``1`` without a pipeline.
        peers: global ranks that hold the same parameters as this rank, ascending. All ranks without model parallelism.
        data: global ranks of this rank's data-parallel group, in the order of the group. With sequence parallelism, several
            of these groups may hold copies of the same state.
        part: index of this rank's part of the job's state, if several data-parallel groups hold a copy of the state. Ranks
            with the same part hold the same values. None if there is one copy.
    """

    rank: int
    world: int
    stage: int
    stages: int
    peers: tuple[int, ...]
    data: tuple[int, ...]
    part: int | None

    @property
    def first(self) -> bool:
        """Whether this rank is the first one that holds its parameters. It describes them for all of its peers."""
        return self.rank == self.peers[0]

    @property
    def with_coordinator(self) -> bool:
        """Whether this rank holds the same parameters as rank 0."""
        return 0 in self.peers

    @property
    def partial(self) -> bool:
        """Whether other ranks hold other parameters than this one."""
        return len(self.peers) < self.world

    @property
    def share(self) -> Share:
        """The share of this rank of the tensors that all of its peers hold.

        Sequence-parallel peers should hold the same values. DeepSpeed 0.19 does not reduce their gradients under ZeRO 0 to 2,
        so their values may differ. The data-parallel group with the first peer therefore stores everything.
        """
        return Share(self.data if self.peers[0] in self.data else (), self.rank)
