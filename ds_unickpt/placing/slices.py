"""The part of a parameter that a tensor-parallel rank has. Pure values: ``ds_unickpt/framework/tensor_parallel.py`` reads them.

ZeRO cuts the rank's part into flat ranges. ``places`` maps such a range to boxes of the global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from unickpt.base.arrays import Shape
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.transform.convert.deepspeed.tensor_parallel import PlacedBox

_KNOWN = 1 << 14  # results that are kept


def local_shape(parameter: torch.nn.Parameter) -> Shape:
    """Return the shape of a parameter on this rank, also if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one parameter on this rank.

    Attributes:
        shape: global shape.
        local: shape of the tensor on this rank.
        boxes: boxes of the tensor with their global positions. They cover it exactly once, except as in ``complete``.
        own: the boxes that no tensor-parallel rank before this one has. This rank stores them.
        averaged: every tensor-parallel rank has the whole parameter with values of its own. Each stores it under a name of its
            own. A load on another number of ranks takes the mean.
    """

    shape: Shape
    local: Shape
    boxes: tuple[PlacedBox, ...]
    own: tuple[PlacedBox, ...]
    averaged: bool = False

    @classmethod
    @lru_cache(maxsize=_KNOWN)
    def whole(cls, shape: Shape, *, stored: bool = True, averaged: bool = False) -> Slice:
        """Return the slice of a parameter that every rank has in full. ``stored``: this rank stores it."""
        box = Box.whole(shape)
        boxes = (PlacedBox(box, box),)
        return cls(shape, shape, boxes, boxes if stored else (), averaged)

    @property
    def complete(self) -> bool:
        """Whether the boxes cover the tensor on this rank. Those of a load may lack padding (``vocabulary.fitted``)."""
        return sum(box.local.numel for box in self.boxes) == math.prod(self.local)

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank has the whole parameter with the same values."""
        return self.local == self.shape and len(self.boxes) == 1 and not self.averaged


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a rank's parameters, by ``id``. Parameters that are not listed are whole."""

    known: Mapping[int, Slice] = field(default_factory=dict)

    def of(self, parameter: torch.nn.Parameter) -> Slice:
        """Return the slice of a parameter."""
        found = self.known.get(id(parameter))
        return Slice.whole(local_shape(parameter)) if found is None else found

    def fitted(self, parameter: torch.nn.Parameter, part: Slice) -> Slices:
        """Return the slices with another one for a parameter."""
        return Slices({**self.known, id(parameter): part})


@dataclass(frozen=True, slots=True)
class RankValues:
    """The parameters to average of a tensor-parallel rank, which has values of its own of them.

    Attributes:
        parameters: their ids.
        rank, ranks: tensor-parallel rank, and number of tensor-parallel ranks.
        holders: global ranks that have the same values, ascending.
    """

    parameters: frozenset[int] = frozenset()
    rank: int = 0
    ranks: int = 1
    holders: tuple[int, ...] = ()

    def stored(self, name: str, parameter: torch.nn.Parameter) -> str:
        """Return the stored name of this rank's values of a parameter."""
        return f"{name}@tp{self.rank}" if self.rank and id(parameter) in self.parameters else name


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """A region of a flat range, and its position in the global tensor.

    Attributes:
        whole: box in the global tensor.
        local: the same box in the rank's tensor.
        run: box of the rank's tensor that contains ``local``. Its elements are consecutive in the flat range.
        at: position of the first element of ``run`` in the flat range.
        numel: number of elements of ``run``.
        index: ``local`` as an index into ``run``; None if they are equal.
    """

    whole: Box
    local: Box
    run: Box
    at: int
    numel: int
    index: tuple[slice, ...] | None

    @classmethod
    def made(cls, whole: Box, local: Box, run: Box, at: int) -> FlatPlace:
        return cls(whole, local, run, at, run.numel, None if local == run else local.within(run).slices())

    def of(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Return the elements: 1-D and contiguous if they are consecutive, else in the shape of the box.

        ``flat`` is 1-D and contains the flat range from position ``begin`` on.
        """
        data = flat.narrow(0, begin + self.at, self.numel)
        return data if self.index is None else data.view(self.run.shape)[self.index]


@lru_cache(maxsize=_KNOWN)
def places(shape: Shape, boxes: tuple[PlacedBox, ...], lo: int, hi: int) -> tuple[FlatPlace, ...]:
    """Return the global positions of the flat range ``[lo, hi)`` of a rank's tensor with a shape and boxes of a ``Slice``.

    They are the same at every save, and for every state of a parameter, so they are kept.
    """
    found, at = [], 0
    for run in split_flat_range(shape, lo, hi):
        for box in boxes:
            common = box.common(run)
            if common is not None:
                found.append(FlatPlace.made(common[1], common[0], run, at))
        at += run.numel
    return tuple(found)
