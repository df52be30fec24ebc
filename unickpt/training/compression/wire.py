"""The two collectives of an exchange."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Wire(Protocol):
    """Collectives of the ranks that have the same parameters.

    Attributes:
        rank, world: this rank, and number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row ``r`` to rank ``r``. Returns the rows that all ranks sent to this one: uint8 ``[world, bytes]``."""
        ...

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Send one row, uint8 ``[1, bytes]``, to all ranks. Returns the rows of all ranks: uint8 ``[world, bytes]``."""
        ...


class GroupWire:
    """Collectives of a process group of torch."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group``: None for the default group."""
        self._group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(rows)
        dist.all_to_all_single(found, rows.contiguous(), group=self._group)
        return found

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        found = torch.empty(self.world, row.shape[1], dtype=row.dtype, device=row.device)
        dist.all_gather_into_tensor(found, row.contiguous(), group=self._group)
        return found
