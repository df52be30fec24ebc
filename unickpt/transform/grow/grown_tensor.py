"""Reading of a grown tensor: elements of the source where they exist, filled elsewhere, box by box."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.readings import Reading
from unickpt.transform.grow.origins import PositionRun, copies_of, runs

_BLOCK_ELEMENTS = 4 << 20
FillBox = Callable[
    [Box, tuple[PositionRun, ...]], torch.Tensor
]  # box of new elements and its runs -> values that broadcast to the box


@dataclass(frozen=True)
class GrownTensor:
    """A reading. It can be called with boxes of the grown tensor.

    Attributes:
        read: reading of the source.
        dtype: format name of the dtype.
        origins: origin of every dimension; empty arrays are not allowed.
        fill: values of new elements.
        factor: factor of the elements of the source.
        shared: exponent: an element with n copies is divided by n ** shared.
    """

    read: Reading
    dtype: str
    origins: Sequence[Ints]
    fill: FillBox
    factor: float = 1.0
    shared: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(origin) for origin in self.origins)

    def __call__(self, box: Box) -> torch.Tensor:
        found = torch.empty(box.shape, dtype=torch_dtype(self.dtype))
        parts = [
            runs(origin, first, stop, copies_of(origin) if self.shared else np.broadcast_to(np.int64(1), origin.shape))
            for origin, first, stop in zip(self.origins, box.start, box.stop, strict=True)
        ]
        for cell in itertools.product(*parts):
            part = Box(tuple(run.start for run in cell), tuple(run.length for run in cell))
            place = found[part.within(box).slices()]
            if all(run.origin >= 0 for run in cell):
                source = Box(tuple(run.origin for run in cell), part.shape)
                place.copy_(self._scaled(self.read(source).view(part.shape), cell))
            else:
                place.copy_(self.fill(part, cell))
        return found.reshape(-1)

    def _scaled(self, values: torch.Tensor, cell: Sequence[PositionRun]) -> torch.Tensor:
        factor = self.factor
        for run in cell:
            factor /= run.copies**self.shared
        return values if factor == 1.0 else values.double() * factor


class Mean:
    """Mean of all elements of a tensor, computed in float64 at the first use."""

    def __init__(self, read: Reading, shape: Sequence[int], factor: float = 1.0) -> None:
        self._read, self._shape, self._factor = read, tuple(shape), factor
        self._lock = threading.Lock()
        self._value: float | None = None

    def __call__(self, _box: Box, _cell: tuple[PositionRun, ...]) -> torch.Tensor:
        with self._lock:
            if self._value is None:
                whole = Box.whole(self._shape)
                blocks = cut(whole, _BLOCK_ELEMENTS) if whole.numel else []
                total = sum(float(self._read(block).double().sum()) for block in blocks)
                self._value = self._factor * total / max(whole.numel, 1)
            return torch.tensor(self._value, dtype=torch.float64)


def constant(value: float) -> FillBox:
    """Return a fill with one value."""
    return lambda _box, _cell: torch.tensor(value, dtype=torch.float64)


def mean_along(read: Reading, dim: int, size: int) -> FillBox:
    """Return a fill with the mean of the source along one dimension, and zeros where another dimension is new.

    Args:
        read: reading of the source.
        dim: dimension of the stream.
        size: its extent in the source.
    """

    def fill(box: Box, cell: tuple[PositionRun, ...]) -> torch.Tensor:
        if any(run.origin < 0 for at, run in enumerate(cell) if at != dim):
            return torch.zeros((), dtype=torch.float64)
        start = tuple(0 if at == dim else run.origin for at, run in enumerate(cell))
        shape = tuple(size if at == dim else run.length for at, run in enumerate(cell))
        values = read(Box(start, shape)).view(shape).double()
        return values.mean(dim, keepdim=True).expand(box.shape)

    return fill
