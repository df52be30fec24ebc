"""Compare two checkpoints tensor by tensor, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint

BLOCK_ELEMENTS = 4 << 20  # elements per block


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two tensors.

    Attributes:
        name: name of the tensor.
        state: state of the tensor.
        elements: number of elements that differ.
        of: number of elements of the tensor.
        largest: largest absolute difference, in float64. NaN if only one side has a NaN at some position.
        relative: largest difference relative to the larger of both absolute values.
        reason: why the tensors cannot be compared. Empty if they were compared.
    """

    name: str
    state: str
    elements: int = 0
    of: int = 0
    largest: float = 0.0
    relative: float = 0.0
    reason: str = ""

    @property
    def equal(self) -> bool:
        return not self.elements and not self.reason


def differences(
    one: Checkpoint, other: Checkpoint, *, verify: str = "off", progress: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """Compare all tensors of two checkpoints. Objects are not compared.

    A weight that only one checkpoint stores is compared with the master of the other, cast to the dtype of the weight, as a
    load does.

    Args:
        one: first checkpoint.
        other: second checkpoint, read under the names of the first.
        verify: checksums that are checked. Tensors are read block by block, so ``always`` reads a large fragment once for each
            of its blocks.
        progress: called with the size in bytes of each compared block.

    Yields:
        One difference per tensor, also for equal tensors.

    Raises:
        CorruptCheckpointError: a file is damaged.
        StorageError: a file cannot be read.
    """
    for info in one.index.tensors:
        if info.kind == "object":
            continue
        twin = other.serving(info.name, info.state)
        if twin is None:
            yield Difference(info.name, info.state, reason="only in the first")
        elif twin.shape != info.shape:
            yield Difference(info.name, info.state, reason=f"{list(info.shape)} in the first, {list(twin.shape)} in the second")
        else:
            yield _compared(one, info, other, twin, verify, progress)
    for info in other.index.tensors:
        if info.kind != "object" and one.serving(info.name, info.state) is None:
            yield Difference(info.name, info.state, reason="only in the second")


def _compared(
    one: Checkpoint, info: TensorInfo, other: Checkpoint, twin: TensorInfo, verify: str, progress: Callable[[int], None]
) -> Difference:
    elements, largest, relative = 0, 0.0, 0.0
    for box in cut(Box.whole(info.shape), BLOCK_ELEMENTS) if info.numel else []:
        a, b = one.read_box(info, box, verify=verify), other.read_box(twin, box, verify=verify)
        if a.dtype != b.dtype and info.state != twin.state:  # weight and master: compare in the dtype of the weight
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
