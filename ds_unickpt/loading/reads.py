"""Collects the read requests of one load: flat ranges of stored tensors that fill live tensors of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_unickpt.placing.slices import Slice, places
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request


@dataclass(frozen=True, slots=True)
class _Copy:
    """A temporary tensor to copy into a target that cannot be filled in place."""

    target: torch.Tensor
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Mean:
    """Temporary tensors of equal size whose mean is a target."""

    target: torch.Tensor
    values: tuple[torch.Tensor, ...]


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors of one shape, as ``merge_tp_slices`` of DeepSpeed computes it, in fp32 or wider."""
    wide = [value if value.dtype == torch.float64 else value.float() for value in values]
    total = wide[0]
    for value in wide[1:]:
        total = total + value
    return total / len(values)


@dataclass
class Reads:
    """Read requests of one load.

    Attributes:
        checkpoint: opened checkpoint.
        stored: this job's names of parameters and buffers -> names in the checkpoint.
        means: names in the checkpoint of the values to average, by the first of them.
        requests: requests added so far.
    """

    checkpoint: Checkpoint
    stored: dict[str, str]
    means: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)
    _means: list[_Mean] = field(default_factory=list)

    def source(self, name: str, state: str) -> tuple[int, TensorInfo] | None:
        """Return position and entry of a stored tensor under this job's name; None if it is absent or derived."""
        position = self.checkpoint.ids.get((self.stored.get(name, ""), state))
        if position is None or self.checkpoint.index.tensors[position].derived_from is not None:
            return None
        return position, self.checkpoint.index.tensors[position]

    def averaged(self, info: TensorInfo) -> list[TensorInfo]:
        """Return the stored tensors whose mean is used in place of a tensor; the tensor itself if it is used as it is.

        Raises:
            MismatchError: a tensor-parallel rank did not store its values.
        """
        found = []
        for name in self.means.get(info.name, (info.name,)):
            each = self.checkpoint.info(name, info.state)
            if each is None or each.shape != info.shape:
                raise MismatchError(f"{self.checkpoint.storage}: {name} has no {info.state} of shape {info.shape} to average")
            found.append(each)
        return found

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

    def fill(self, position: int, part: Slice, lo: int, hi: int, flat: torch.Tensor, *, derived: bool = False) -> None:
        """Request the flat range ``[lo, hi)`` of this rank's part of a stored tensor into ``flat`` of ``hi - lo`` elements.

        Padding that the checkpoint lacks becomes zero. ``derived``: as in ``Request``.
        """
        if not part.complete:
            flat.zero_()
        infos = self.averaged(self.checkpoint.index.tensors[position])
        targets = (flat,) if len(infos) == 1 else tuple(flat.new_zeros(flat.shape, dtype=torch.float32) for _ in infos)
        for info, target in zip(infos, targets, strict=True):
            for place in places(part.local, part.boxes, lo, hi):
                self.requests.append(Request(self.checkpoint.ids[info.key], place.whole, place.of(target), derived))
        if len(targets) > 1:
            self._means.append(_Mean(flat, targets))

    def finish(self) -> None:
        """Compute the means, and copy the temporaries into their targets, after reading."""
        for each in self._means:
            each.target.copy_(mean(each.values))
        for copy in self._copies:
            copy.target.detach().copy_(copy.flat.view(copy.target.shape))
