"""Process groups of gloo whose ranks are threads of this process."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
_LIMIT = datetime.timedelta(seconds=60)


class ThreadWire:
    """Collectives of one rank. Counts the bytes that it passes to gloo for other ranks.

    Attributes:
        rank, world: this rank, and number of ranks.
        sent_bytes: bytes for other ranks so far.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.rank, self.world, self.sent_bytes = rank, world, 0
        self._group = dist.ProcessGroupGloo(store, rank, world, _LIMIT)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += rows.nbytes // self.world * (self.world - 1)
        found = torch.empty_like(rows)
        self._group.alltoall_base(found, rows.contiguous(), [], []).wait()
        return found

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += row.nbytes * (self.world - 1)
        found = torch.empty(self.world, row.shape[1], dtype=row.dtype)
        self._group._allgather_base(found, row.contiguous()).wait()
        return found


def on_gloo(action: Callable[[ThreadWire], Result], world: int) -> list[Result]:
    """Run an action on every rank, and return its results in order of the ranks. Raises what a rank raised."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: action(ThreadWire(store, rank, world)), range(world)))
