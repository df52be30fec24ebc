"""Readings: functions that read boxes of a tensor from the files of another program, or from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.pickles.lazy_tensor import Located

Reading = Callable[[Box], torch.Tensor]  # box in the tensor's coordinates -> its elements, 1-D in row-major order


class InPlace(ABC):
    """A reading that can fill given memory."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, box: Box) -> torch.Tensor: ...

    @abstractmethod
    def read_into(self, box: Box, target: torch.Tensor) -> None:
        """Read a box into a 1-D tensor of its dtype with as many elements."""


@dataclass(frozen=True, slots=True)
class BoxOf(InPlace):
    """Reading of boxes within the box ``whole`` of a tensor, which has the shape of ``data``."""

    whole: Box
    data: Located

    def __call__(self, box: Box) -> torch.Tensor:
        return self.data.read(box.within(self.whole))

    def read_into(self, box: Box, target: torch.Tensor) -> None:
        self.data.read_into(box.within(self.whole), target)


@dataclass(frozen=True)
class Regions:
    """A tensor that is read from several places.

    Attributes:
        dtype: format name of the dtype.
        parts: disjoint boxes, each with the function that reads it.
    """

    dtype: str
    parts: Sequence[tuple[Box, Reading]]

    def read(self, box: Box) -> torch.Tensor:
        """Read a box, 1-D in row-major order. Raises FormatError if the parts do not cover it."""
        target = torch.empty(box.shape, dtype=torch_dtype(self.dtype))
        left = box.numel
        for place, read in self.parts:
            common = place.intersect(box) if box.numel else None
            if common is not None:
                target[common.within(box).slices()] = read(common).view(common.shape)
                left -= common.numel
        if left:
            raise FormatError(f"the source lacks {left:,} elements of {box} of a tensor")
        return target.reshape(-1)
