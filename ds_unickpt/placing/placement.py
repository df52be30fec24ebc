"""Where a rank stands among the ranks of a job. Pure values: ``partitions.placement`` reads them from DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from unickpt.checkpoint.state.held import Copies


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank stands among the ranks of the job.

    Attributes:
        rank: global rank.
        world: number of ranks of the job.
        stage, stages: pipeline stage of this rank, and number of stages. ``0`` and ``1`` without a pipeline.
        peers: global ranks that hold the same parameters as this rank, ascending. All ranks without model parallelism.
        stage_ranks: global ranks of this rank's pipeline stage, ascending. All ranks without a pipeline. They hold the same
            parameters, except experts.
        data: global ranks of this rank's data-parallel group, in the order of the group. With sequence parallelism, several
            of these groups may hold copies of the same state.
        part: index of this rank's part of the job's state, if several data-parallel groups hold a copy of the state. Ranks
            with the same part hold the same values. None if there is one copy.
        tensor, tensors: tensor-parallel rank of this rank, and number of tensor-parallel ranks. ``0`` and ``1`` without
            tensor parallelism.
    """

    rank: int
    world: int
    stage: int
    stages: int
    peers: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    data: tuple[int, ...]
    part: int | None
    tensor: int = 0
    tensors: int = 1

    @property
    def slice_ranks(self) -> tuple[int, ...]:
        """Global ranks of the pipeline stage that hold the same slices of the parameters, ascending."""
        return self.stage_ranks if self.tensors == 1 else tuple(sorted(self.data))

    @property
    def replica(self) -> int:
        """Number of this rank's tensor-parallel group in the job: the rank itself without tensor parallelism."""
        return self.rank if self.tensors == 1 else self.stage * len(self.data) + self.data.index(self.rank)

    def stores(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank stores its part of the slices that DeepSpeed partitions over ``ranks``, and not another group."""
        return self.slice_ranks[0] in ranks

    def across(self, ranks: tuple[int, ...]) -> bool:
        """Whether DeepSpeed partitions over ranks with different slices. It does so only with whole parameters."""
        return self.tensors > 1 and not set(ranks) <= set(self.slice_ranks)

    @property
    def first(self) -> bool:
        """Whether this rank is the first one that holds its parameters. It describes them for all of its peers."""
        return self.rank == self.peers[0]

    @property
    def with_coordinator(self) -> bool:
        """Whether this rank holds the same parameters as rank 0, except experts."""
        return 0 in self.stage_ranks

    @property
    def partial(self) -> bool:
        """Whether other ranks hold other parameters than this one."""
        return len(self.peers) < self.world

    def copies(self, holders: tuple[int, ...] | None = None) -> Copies:
        """Return the ranks that store a part of a tensor that they all hold.

        Sequence-parallel peers should hold the same values. DeepSpeed 0.19 does not reduce their gradients under ZeRO 0 to 2,
        so their values may differ. The data-parallel group with the first rank therefore stores everything.

        ``holders``: global ranks with the tensor, if it belongs to an expert. None if all ranks of the stage have it.
        """
        if holders is None:
            holders = self.data if self.stores(self.data) else ()
        return Copies(holders, self.rank)

    def leads(self, holders: tuple[int, ...] | None) -> bool:
        """Whether this rank is the first one with a tensor or module. ``holders``: those that have a part of it."""
        return self.rank == (self.stage_ranks if holders is None else holders)[0]


@dataclass(frozen=True, slots=True)
class Generators:
    """The rank of a saving job whose random generators a rank of this job takes.

    The ranks of a tensor-parallel group compute the same activations, so they need equal generators: their dropout masks
    must agree. The tensor-parallel groups of DeepSpeed and Megatron are consecutive ranks.

    Attributes:
        rank: rank of the saving job. It may not exist.
        number: number of the tensor-parallel group of this rank.
        second: first rank of the second tensor-parallel group of the saving job. It may not exist.
        regrouped: the jobs differ in the number of tensor-parallel ranks.
    """

    rank: int
    number: int
    second: int
    regrouped: bool

    @classmethod
    def of(cls, placed: Placement, before: int) -> Generators:
        """Return the generators of a rank. ``before``: number of tensor-parallel ranks of the saving job."""
        number = placed.replica
        if before == placed.tensors:
            return cls(placed.rank, number, before, regrouped=False)
        return cls(number * before, number, before, regrouped=True)
