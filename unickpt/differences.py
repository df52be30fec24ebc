"""What differs between two checkpoints, tensor by tensor, in a bounded amount of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint

BLOCK_ELEMENTS = 4 << 20  # that are read of each at a time
BETWEEN = ("weight", "master")


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one tensor.

    Attributes:
        name, state: of the tensor.
        elements: that differ.
        of: elements.
        largest: absolute difference, in float64; NaN if one side has a NaN where the other has none.
        relative: the largest one, of the larger of both absolute values.
        told: of tensors that cannot be compared: why; '' otherwise.
    """

    name: str
    state: str
    elements: int = 0
    of: int = 0
    largest: float = 0.0
    relative: float = 0.0
    told: str = ""

    @property
    def equal(self) -> bool:
        return not self.elements and not self.told


def differences(
    one: Checkpoint, other: Checkpoint, *, verify: str = "off", progress: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """Compare all tensors of two checkpoints under the names of both; objects are not compared.

    A weight that only one of them has is compared with the other's master, cast to the type of the weight, as a load would
    make it.

    Args:
        one, other: of the same names.
        verify: what is read against its checksum. Tensors are read a block at a time; ``always`` would read a large
            fragment again for each.
        progress: called with the bytes of ``one`` that were compared.

    Raises:
        CorruptCheckpointError, StorageError: damaged or unreadable.
    """
    for info in one.index.tensors:
        if info.kind == "object":
            continue
        twin = _twin(other, info)
        if twin is None:
            yield Difference(info.name, info.state, told="only in the first")
        elif twin.shape != info.shape:
            yield Difference(info.name, info.state, told=f"{list(info.shape)} in the first, {list(twin.shape)} in the second")
        else:
            yield _compared(one, info, other, twin, verify, progress)
    for info in other.index.tensors:
        if info.kind != "object" and _twin(one, info) is None:
            yield Difference(info.name, info.state, told="only in the second")


def _twin(checkpoint: Checkpoint, info: TensorInfo) -> TensorInfo | None:
    found = checkpoint.info(info.name, info.state)
    if found is None and info.state in BETWEEN:
        found = checkpoint.info(info.name, BETWEEN[1 - BETWEEN.index(info.state)])
    return found


def _compared(
    one: Checkpoint, info: TensorInfo, other: Checkpoint, twin: TensorInfo, verify: str, progress: Callable[[int], None]
) -> Difference:
    elements, largest, relative = 0, 0.0, 0.0
    for box in cut(Box.whole(info.shape), BLOCK_ELEMENTS) if info.numel else []:
        a, b = one.read_box(info, box, verify=verify), other.read_box(twin, box, verify=verify)
        if a.dtype != b.dtype and info.state != twin.state:  # the one is what the other is made of
            a, b = (a, b.to(a.dtype)) if a.element_size() < b.element_size() else (a.to(b.dtype), b)
        unequal = ~((a == b) | ((a != a) & (b != b))) if a.dtype == b.dtype else a.double() != b.double()
        count = int(unequal.sum())
        if count:
            elements += count
            x, y = a[unequal].double(), b[unequal].double()
            apart, size = (x - y).abs(), torch.maximum(x.abs(), y.abs())
            largest, relative = _larger(largest, float(apart.max())), _larger(relative, float((apart / size).max()))
        progress(a.numel() * a.element_size())
    return Difference(info.name, info.state, elements, info.numel, largest, relative)


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
