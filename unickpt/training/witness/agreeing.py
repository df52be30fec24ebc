"""What the ranks tell each other: small tensors of whole numbers, and values that are found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unickpt.base.errors import ConfigError, CoordinationError
from unickpt.base.round_folder import host_name
from unickpt.training.witness.held import Stepped

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process group, or this process alone.

    Attributes:
        group: process group; None: the default one, or this process alone.
        device: where tensors are exchanged.
        rank: global rank of this process.
        ranks: global ranks, in the order of the group.
        hosts: host of each of them.
    """

    group: Any
    device: torch.device
    rank: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, group: Any, device: torch.device) -> Ranks:
        """Return the ranks of a group. Every rank of it calls this.

        Args:
            group: None: of the job.
            device: of the tensors that are compared.
        """
        own = host_name()
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, device, 0, (0,), (own,))
        hosts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(hosts, own, group=group)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        return cls(group, _device_of(group, device), dist.get_rank(), ranks, tuple(hosts))

    @property
    def leads(self) -> bool:
        """Whether this rank writes into the log what concerns all."""
        return self.rank == self.ranks[0]

    @property
    def host(self) -> str:
        """The host of this process."""
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> str:
        """Return the host of a global rank."""
        return self.hosts[self.ranks.index(rank)]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, ``[ranks, ...]`` on the CPU. Every rank calls it, with the same shape."""
        if len(self.ranks) == 1:
            return values[None]
        own = values.to(self.device)
        every = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(every, own, group=self.group)
        return torch.stack(every).cpu()

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks. Every rank calls it."""
        if len(self.ranks) == 1:
            return [value]
        every: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(every, value, group=self.group)
        return every

    def together(self, make: Callable[[], T]) -> T:
        """Return what ``make`` makes on this rank. Every rank calls it, so none waits for one that cannot go on.

        Raises:
            Exception: that of ``make``.
            CoordinationError: it could not on another rank.
        """
        failure: Exception | None = None
        try:
            made = make()
        except Exception as err:  # of any program: what the others wait for comes first
            failure = err
        failed = self.gather(torch.tensor([failure is not None], device="cpu").int())[:, 0].tolist()
        if failure is not None:
            raise failure
        if any(failed):
            others = ", ".join(str(rank) for rank, each in zip(self.ranks, failed, strict=True) if each)
            raise CoordinationError(f"rank {others} cannot go on; its log says why")
        return made

    def pass_on(self, data: bytes, *, to: int, source: int) -> bytes:
        """Send bytes to a rank, and return those of another one. Every rank calls it; ranks are numbers in the group."""
        sizes = self.gather(torch.tensor([len(data)], device="cpu"))[:, 0]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        found = torch.empty(int(sizes[source]), dtype=torch.uint8, device=self.device)
        sent = dist.P2POp(dist.isend, own, self.ranks[to], self.group)
        got = dist.P2POp(dist.irecv, found, self.ranks[source], self.group)
        for work in dist.batch_isend_irecv([sent, got]):
            work.wait()
        return found.cpu().numpy().tobytes()


def ranks_of(groups: Iterable[Any]) -> set[int]:
    """Return the global ranks of some process groups."""
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks that compare their copies.

    Attributes:
        ranks: those that exchange hashes.
        positions: of the compared parameters in the list of this rank. All ranks have the same parameters there.
        names: of these parameters.
        copies: for each of them, ranks that hold the same part, one tuple for each part.
    """

    ranks: Ranks
    positions: tuple[int, ...]
    names: tuple[str, ...]
    copies: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def compares(self) -> bool:
        """Whether a parameter has a copy."""
        return any(self.copies)

    def require_in(self, stepped: Sequence[Stepped]) -> None:
        """Raise ConfigError if this rank's list does not have the parameters at their positions any more."""
        found = tuple(stepped[at].name if at < len(stepped) else "nothing" for at in self.positions)
        other = next((pair for pair in zip(self.names, found, strict=True) if pair[0] != pair[1]), None)
        if other is not None:
            raise ConfigError("the optimizer has other parameters than at the beginning: {1} in place of {0}".format(*other))


def meet(ranks: Ranks, stepped: Sequence[Stepped], positions: Sequence[int] | None = None) -> Circle:
    """Return the circle of some ranks. Every one of them calls it.

    Args:
        ranks: those that meet.
        stepped: what this rank holds.
        positions: of what they compare; None: of all.

    Raises:
        ConfigError: the ranks hold other parameters, such as those of another pipeline stage.
    """
    positions = tuple(range(len(stepped)) if positions is None else positions)
    some = [stepped[at] for at in positions]
    names = tuple(each.name for each in some)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    every = ranks.gather_objects((digest, [each.ranks for each in some]))
    if len({name for name, _ in every}) > 1:
        raise ConfigError("the witness needs the same parameters on all ranks, and these ranks hold others, such as stages")
    copies = tuple(tuple(sorted({tuple(held[at]) for _, held in every} - {()})) for at in range(len(some)))
    return Circle(ranks, positions, names, copies)


def circles(groups: Sequence[Ranks], stepped: Sequence[Stepped]) -> tuple[Circle, ...]:
    """Return the circles of the parameters whose copies are those of one of some groups. Every rank calls it.

    Args:
        groups: in an order that no two ranks have the other way round.
        stepped: what this rank holds.

    Raises:
        ConfigError: the ranks of a group hold other parameters. Raised after all groups have met.
    """
    found, failure = [], None
    for ranks in groups:
        own = tuple(sorted(ranks.ranks))
        try:
            found.append(meet(ranks, stepped, [at for at, each in enumerate(stepped) if each.ranks == own]))
        except ConfigError as err:
            failure = err
    if failure is not None:
        raise failure
    return tuple(found)


def _device_of(group: Any, wanted: torch.device) -> torch.device:
    """Return where a group exchanges tensors: the wanted device, unless its backend cannot, as with weights in host memory."""
    kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    if wanted.type in kinds:
        return wanted
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
