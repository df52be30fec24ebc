"""What one load asks of a checkpoint: flat ranges of stored tensors, into live tensors of this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unickpt.fragments import split_flat_range
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint
from unickpt.reading import Request


@dataclass(frozen=True, slots=True)
class _Copy:
    """A temporary that has to be copied into a tensor which cannot be filled in place."""

    target: torch.Tensor
    flat: torch.Tensor


@dataclass
class Reads:
    """Collected requests.

    Attributes:
        checkpoint: that is read.
        stored: this job's names of parameters and buffers -> names in the checkpoint.
        requests: everything asked for so far.
    """

    checkpoint: Checkpoint
    stored: dict[str, str]
    requests: list[Request] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)

    def source(self, name: str, state: str) -> tuple[int, TensorInfo] | None:
        """A stored (not derived) tensor of one of this job's names."""
        position = self.checkpoint.ids.get((self.stored.get(name, ""), state))
        if position is None or self.checkpoint.index.tensors[position].derived_from is not None:
            return None
        return position, self.checkpoint.index.tensors[position]

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D tensor through which ``tensor`` is filled in row-major order."""
        data = tensor.detach()
        if data.is_contiguous():
            return data.view(-1)
        flat = data.reshape(-1).clone()
        self.copy_later(tensor, flat)
        return flat

    def copy_later(self, target: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy ``flat`` into a tensor of as many elements once everything is read."""
        self._copies.append(_Copy(target, flat))

    def fill(self, position: int, lo: int, hi: int, flat: torch.Tensor) -> None:
        """Ask for the flat range ``[lo, hi)`` of a stored tensor, into ``hi - lo`` elements."""
        at = 0
        for box in split_flat_range(self.checkpoint.index.tensors[position].shape, lo, hi):
            self.requests.append(Request(position, box, flat.narrow(0, at, box.numel)))
            at += box.numel

    def finish(self) -> None:
        """After reading: into the tensors that could not be filled in place."""
        for copy in self._copies:
            copy.target.detach().copy_(copy.flat.view(copy.target.shape))
