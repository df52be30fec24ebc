"""Predicted errors of computing layers in a narrower dtype, from the weights of a checkpoint.

The error of a layer is the sum over its matrices of ``v * delta**2 / 2``: ``delta`` is the change of a weight by the cast, and
``v`` the optimizer's mean of squared gradients (Adam's ``exp_avg_sq``), as for the indicator ``second-moment`` of ``measure``.
Without second moments of all of them, ``v`` is 2 for every weight. Activations are not part of it: QSync's indicator
(arXiv 2407.02327, section 4.2) has them too, and needs a run that records them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.quantise.measure import BLOCK_ELEMENTS, MOMENT
from unickpt.transform.quantise.scheme import SECOND_MOMENT, WEIGHT_ERROR


@dataclass(frozen=True, slots=True)
class NarrowingErrors:
    """Predicted errors.

    Attributes:
        indicator: ``second-moment`` or ``weight-error``.
        errors: predicted error of each layer, in the order asked for.
    """

    indicator: str
    errors: tuple[float, ...]


def narrowing_errors(
    checkpoint: Checkpoint, layers: Sequence[str], dtype: torch.dtype, progress: Callable[[int], None] = lambda _: None
) -> NarrowingErrors:
    """Measure how layers change if their matrices are cast.

    Args:
        checkpoint: checkpoint of the job.
        layers: names of layers. The weights of a layer are those whose names begin with it and a dot. Megatron stores the
            layers of a decoder as one tensor ``[layers, ...]`` without their number in the name.
        dtype: dtype of the computation, such as bfloat16.
        progress: called with the number of bytes of weights that were read.

    Raises:
        MismatchError: the checkpoint has no weights of a layer, or weights that are not finite.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
    """
    found = [_matrices(checkpoint, layer) for layer in layers]
    moments = all(checkpoint.info(info.name, MOMENT) is not None for matrices in found for info, _ in matrices)
    errors = [sum(_error(checkpoint, info, box, dtype, moments, progress) for info, box in matrices) for matrices in found]
    return NarrowingErrors(SECOND_MOMENT if moments else WEIGHT_ERROR, tuple(errors))


def _matrices(checkpoint: Checkpoint, layer: str) -> list[tuple[TensorInfo, Box]]:
    """Return the matrices of a layer, and the part of each tensor that is the layer's."""
    weights = [info for info in checkpoint.index.tensors if info.state == "weight"]
    own = [info for info in weights if info.name.startswith(f"{layer}.")]
    if own:
        return [(info, Box.whole(info.shape)) for info in own if len(info.shape) > 1]
    place, _, last = layer.rpartition(".")
    number = int(last) if last.isdecimal() else -1
    stacked = [
        info
        for info in weights
        if number >= 0
        and info.name.startswith(f"{place}.")
        and info.shape[:1] > (number,)
        and not info.name.removeprefix(f"{place}.").partition(".")[0].isdecimal()
    ]
    if not stacked:
        known = ", ".join(sorted({info.name for info in weights})[:3])
        raise MismatchError(
            f"{checkpoint.storage}: has no weights of layer {layer}, such as {layer}.weight; it has {known}, ..."
        )
    parts = [(info, Box((number, *(0 for _ in info.shape[1:])), (1, *info.shape[1:]))) for info in stacked]
    return [(info, box) for info, box in parts if len(info.shape) > 2]


def _error(
    checkpoint: Checkpoint, info: TensorInfo, whole: Box, dtype: torch.dtype, moments: bool, progress: Callable[[int], None]
) -> float:
    total = 0.0
    moment = checkpoint.info(info.name, MOMENT) if moments else None
    for box in cut(whole, max(BLOCK_ELEMENTS, math.prod(info.shape[1:]))):
        values = checkpoint.read_box(info, box, verify="off")
        squared = (values.to(dtype).double() - values.double()).square()
        if moment is not None:
            squared *= checkpoint.read_box(moment, box, verify="off").double() / 2
        total += float(squared.sum())
        progress(values.numel() * values.element_size())
    if not math.isfinite(total):
        raise MismatchError(f"{checkpoint.storage}: {info.name} has values that are not finite")
    return total
