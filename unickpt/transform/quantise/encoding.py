"""Tensors as a file has them: cast, or rounded and packed, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtypes import name_of, torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.transform.quantise.rounding import packed, rounded
from unickpt.transform.quantise.scheme import Scheme

Slot = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
Read = Callable[[Box], torch.Tensor]


class Encoding(Protocol):
    """How tensors of a checkpoint are written to files."""

    def dtype(self, info: TensorInfo) -> str:
        """Return the dtype in which the model computes with a tensor."""

    def slots(self, info: TensorInfo) -> list[Slot]:
        """Return the tensors of the file, in order, that hold a tensor of the checkpoint."""

    def data(self, info: TensorInfo, read: Read, block_elements: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield parts of the slots: the number of the slot, and its next elements, 1-D. Each slot's parts come in order.

        Args:
            info: tensor of the checkpoint.
            read: returns a box of it, 1-D in row-major order.
            block_elements: elements to read at a time; more if one row has more.
        """


def is_float(info: TensorInfo) -> bool:
    """Whether a tensor has a floating point dtype."""
    return info.dtype.startswith(("F", "BF"))


@dataclass(frozen=True, slots=True)
class CastEncoding:
    """Tensors under their own names; floating point ones in ``to``, or as stored for None."""

    to: torch.dtype | None = None

    def dtype(self, info: TensorInfo) -> str:
        return info.dtype if self.to is None or not is_float(info) else name_of(self.to)

    def slots(self, info: TensorInfo) -> list[Slot]:
        return [(info.name, self.dtype(info), info.shape)]

    def data(self, info: TensorInfo, read: Read, block_elements: int) -> Iterator[tuple[int, torch.Tensor]]:
        for box in cut(Box.whole(info.shape), block_elements) if info.numel else ():
            data = read(box)
            yield 0, data if self.to is None or not data.is_floating_point() else data.to(self.to)


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights of modules with a scheme rounded and packed; all other tensors as ``CastEncoding`` writes them.

    Attributes:
        schemes: scheme by name of the module.
        others: encoding of all else, and dtype of the scales.
    """

    schemes: Mapping[str, Scheme]
    others: CastEncoding

    def dtype(self, info: TensorInfo) -> str:
        return self.others.dtype(info)

    def slots(self, info: TensorInfo) -> list[Slot]:
        scheme = self._scheme(info)
        if scheme is None:
            return self.others.slots(info)
        return [
            (f"{info.name}_packed", "I32", scheme.packed(info.shape)),
            (f"{info.name}_scale", self.dtype(info), scheme.scales(info.shape)),
            (f"{info.name}_shape", "I64", (2,)),
        ]

    def data(self, info: TensorInfo, read: Read, block_elements: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield as ``Encoding``.

        Raises:
            FormatError: a weight is not finite.
        """
        scheme = self._scheme(info)
        if scheme is None:
            yield from self.others.data(info, read, block_elements)
            return
        for box in cut(Box.whole(info.shape), max(block_elements, info.shape[1])):
            levels, scales = rounded(read(box).view(box.shape), scheme, torch_dtype(self.dtype(info)))
            if not bool(scales.isfinite().all()):
                raise FormatError(f"{info.name}: has values that are not finite, or too large for scales in {self.dtype(info)}")
            yield 0, packed(levels, scheme.bits).flatten()
            yield 1, scales.flatten()
        yield 2, torch.tensor(info.shape, dtype=torch.int64)

    def _scheme(self, info: TensorInfo) -> Scheme | None:
        scheme = self.schemes.get(info.name.removesuffix(".weight")) if info.name.endswith(".weight") else None
        return scheme if scheme is not None and scheme.rounds else None
