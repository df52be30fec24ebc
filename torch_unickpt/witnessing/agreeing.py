"""What the ranks tell each other: small tensors of whole numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.witnessing.held import Stepped
from unickpt.base.errors import ConfigError
from unickpt.base.round_folder import host_name


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that compare.

    Attributes:
        group: process group; None: the default one, or this process alone.
        device: where tensors are exchanged.
        rank: global rank of this process.
        ranks: global ranks, in the order of the group.
        hosts: host of each of them.
        copies: of each optimizer, for each parameter: ranks that hold the same part of it, one tuple for each part.
    """

    group: Any
    device: torch.device
    rank: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    copies: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def leads(self) -> bool:
        """Whether this rank writes into the log what concerns all."""
        return self.rank == self.ranks[0]

    @property
    def host(self) -> str:
        """The host of this process."""
        return self.hosts[self.ranks.index(self.rank)]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, int64 ``[ranks, ...]`` on the CPU. Every rank calls it, with the same shape."""
        if len(self.ranks) == 1:
            return values[None]
        own = values.to(self.device)
        every = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(every, own, group=self.group)
        return torch.stack(every).cpu()

    def pass_on(self, data: bytes, *, to: int, source: int) -> bytes:
        """Send bytes to a rank, and return those of another one. Every rank calls it; ranks are numbers in the group."""
        sizes = self.gather(torch.tensor([len(data)]))[:, 0]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        found = torch.empty(int(sizes[source]), dtype=torch.uint8, device=self.device)
        sent = dist.P2POp(dist.isend, own, self.ranks[to], self.group)
        got = dist.P2POp(dist.irecv, found, self.ranks[source], self.group)
        for work in dist.batch_isend_irecv([sent, got]):
            work.wait()
        return found.cpu().numpy().tobytes()


def meet(model: torch.nn.Module, optimizers: Sequence[Sequence[Stepped]]) -> Ranks:
    """Return the ranks of a job. Every rank calls it.

    Raises:
        ConfigError: the ranks hold other parameters, such as those of another pipeline stage.
    """
    device = next((each.parameter.device for stepped in optimizers for each in stepped), torch.device("cpu"))
    names = [each.name for stepped in optimizers for each in stepped]
    own: dict[str, Any] = {
        "host": host_name(),
        "digest": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "copies": [[each.ranks for each in stepped] for stepped in optimizers],
    }
    if not dist.is_available() or not dist.is_initialized():
        alone = tuple(tuple(() for _ in stepped) for stepped in optimizers)
        return Ranks(None, device, 0, (0,), (own["host"],), alone)
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    if len({each["digest"] for each in every}) > 1:
        raise ConfigError("the witness needs the same parameters on all ranks, and these ranks hold others, such as stages")
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    copies = tuple(
        tuple(tuple(sorted({tuple(each["copies"][k][at]) for each in every} - {()})) for at in range(len(stepped)))
        for k, stepped in enumerate(optimizers)
    )
    return Ranks(group, _device_of(group, device), dist.get_rank(), ranks, tuple(each["host"] for each in every), copies)


def _device_of(group: Any, wanted: torch.device) -> torch.device:
    """Return where a group exchanges tensors: the wanted device, unless its backend cannot, as with weights in host memory."""
    kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    if wanted.type in kinds:
        return wanted
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
