"""Collects the read requests of one load: flat ranges of stored tensors that fill live tensors of this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_unickpt.slices import Slice, places
from unickpt.format.index import TensorInfo
from unickpt.load.checkpoint import Checkpoint
from unickpt.load.reader import Request


@dataclass(frozen=True, slots=True)
class _Copy:
    """A temporary tensor to copy into a target that cannot be filled in place."""

    target: torch.Tensor
    flat: torch.Tensor


@dataclass
class Reads:
    """Read requests of one load.

    Attributes:
        checkpoint: opened checkpoint.
        stored: this job's names of parameters and buffers -> names in the checkpoint.
        requests: requests added so far.
    """

    checkpoint: Checkpoint
    stored: dict[str, str]
    requests: list[Request] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)

    def source(self, name: str, state: str) -> tuple[int, TensorInfo] | None:
        """Return position and entry of a stored tensor under this job's name; None if it is absent or derived."""
        position = self.checkpoint.ids.get((self.stored.get(name, ""), state))
        if position is None or self.checkpoint.index.tensors[position].derived_from is not None:
            return None
        return position, self.checkpoint.index.tensors[position]

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a 1-D tensor that fills ``tensor`` in row-major order: a view, or a temporary that ``finish`` copies."""
        data = tensor.detach()
        if data.is_contiguous():
            return data.view(-1)
        flat = data.reshape(-1).clone()
        self.copy_later(tensor, flat)
        return flat

    def copy_later(self, target: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy ``flat`` into ``target``, which has the same number of elements, in ``finish``."""
        self._copies.append(_Copy(target, flat))

    def fill(self, position: int, part: Slice, lo: int, hi: int, flat: torch.Tensor) -> None:
        """Request the flat range ``[lo, hi)`` of this rank's part of a stored tensor into ``flat`` of ``hi - lo`` elements.

        Padding that the checkpoint lacks becomes zero.
        """
        if not part.complete:
            flat.zero_()
        for place in places(part.local, part.boxes, lo, hi):
            self.requests.append(Request(position, place.whole, place.of(flat)))

    def finish(self) -> None:
        """Copy the temporaries into their targets, after reading."""
        for copy in self._copies:
            copy.target.detach().copy_(copy.flat.view(copy.target.shape))
