"""The ranks that save or load together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from unickpt.base.errors import ConfigError
from unickpt.base.round_folder import ends_of_job
from unickpt.checkpoint.coordination.message_exchange import MessageExchange


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that save or load together.

    Attributes:
        rank: this rank in the group.
        ranks: global rank of each rank of the group.
    """

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    _numbers: Mapping[int, int] = field(init=False, repr=False, compare=False)  # in the group, by global rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {rank: at for at, rank in enumerate(self.ranks)})

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Group:
        """Return the ranks of a process group that this process is a member of. None: as for ``exchange_of``."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(group), tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))

    def among(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of this group among global ranks, ascending, as numbers in the group."""
        return tuple(sorted(self._numbers[rank] for rank in ranks if rank in self._numbers))


def exchange_of(
    group: dist.ProcessGroup | None, *, timeout_s: float, purpose: str = "api", place: str = "", alone: bool = False
) -> MessageExchange:
    """Return the message exchange for one save or load of a process group; None: the default group, or this process alone.

    Every rank of the group makes the same calls in the same order. The key-value store of the job counts the calls of each
    rank, so the n-th call of one rank meets the n-th call of the others. A rank skips calls that it never made, and that the
    others gave up.

    Args:
        group: process group.
        timeout_s: seconds to wait for the other ranks.
        purpose: kind of the calls that are counted. Calls of one kind are made by one thread at a time.
        place: checkpoint of the call. Its name tells a rank that is late from one that has not made this call.
        alone: the call is of this process alone.

    Raises:
        ConfigError: this process is not a member of the group.
    """
    initialized = dist.is_available() and dist.is_initialized() and not alone
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if initialized else (0, 1)
    if rank < 0:
        raise ConfigError("this process is not a member of the process group that was passed as group")
    if world == 1:
        return MessageExchange(None, rank=0, world=1, prefix="unickpt")
    store = dist.distributed_c10d._get_default_store()
    name = "default" if group is None else group.group_name
    counter = f"unickpt/{purpose}/{name}/calls"
    ended = ends_of_job(rank, world) if group is None else frozenset

    def counted() -> MessageExchange:
        number = store.add(f"{counter}/{rank}", 1)
        return MessageExchange(
            store, rank=rank, world=world, prefix=f"unickpt/{purpose}/{name}/{number}", timeout_s=timeout_s, ended=ended,
            call=place.rstrip("/").rpartition("/")[2],
        )  # fmt: skip

    exchange = counted()
    while exchange.is_of_others():
        exchange = counted()
    return exchange
