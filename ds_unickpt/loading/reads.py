"""Collects the read requests of one load: flat ranges of stored tensors that fill live tensors of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_unickpt.placing.slices import Slice, places
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.state.filling import Filling


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors of one shape, as ``merge_tp_slices`` of DeepSpeed computes it, in fp32 or wider."""
    wide = [value if value.dtype == torch.float64 else value.float() for value in values]
    total = wide[0]
    for value in wide[1:]:
        total = total + value
    return total / len(values)


@dataclass
class Reads(Filling):
    """What one load fills, by the names of this job.

    Attributes:
        stored: this job's names of parameters and buffers -> names in the checkpoint.
        means: names in the checkpoint of the values to average, by the first of them.
        _means: targets, each with the tensors of equal size whose mean it gets.
    """

    stored: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _means: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = field(default_factory=list)

    def source(self, name: str, state: str) -> TensorInfo | None:
        """Return the tensor that serves one of this job; see ``Filling.source``."""
        return super().source(self.stored.get(name, ""), state)

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

    def fill(self, info: TensorInfo, part: Slice, lo: int, hi: int, flat: torch.Tensor, *, derived: bool = False) -> None:
        """Request the flat range ``[lo, hi)`` of this rank's part of a tensor into ``flat`` of ``hi - lo`` elements.

        Padding that the checkpoint lacks becomes zero. ``derived``: as in ``Request``.
        """
        if not part.complete:
            flat.zero_()
        found = places(part.local, part.boxes, lo, hi)
        if info.name not in self.means:
            for place in found:
                self.request(info, place.whole, place.of(flat), derived=derived)
            return
        infos = self.averaged(self.origin(info))
        values = tuple(flat.new_zeros(flat.shape, dtype=torch.float32) for _ in infos)
        for each, value in zip(infos, values, strict=True):
            for place in found:
                self.request(each, place.whole, place.of(value))
        self._means.append((flat, values))

    def finish(self) -> None:
        """Compute the means, and copy the temporaries into their targets, after reading."""
        for target, values in self._means:
            target.copy_(mean(values))
        super().finish()

    def account(self, name: str, state: str, info: TensorInfo, dtype: str, note: str = "") -> None:
        """As ``Filling.account``. ``note`` is also about a mean."""
        values = self.means.get(self.stored.get(name, ""), ())
        if values:
            text = f"the mean of the values of {len(values)} tensor-parallel ranks{note}"
            self.report.add(name, state, "cast", text)
        else:
            super().account(name, state, info, dtype, note)
