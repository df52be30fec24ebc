"""Predicted errors of rounding, by unit and scheme, from the weights of a checkpoint.

Three indicators; each is a sum over the values of a weight, so errors of units add up:

    second-moment   half of ``v * delta**2``: ``v`` is the optimizer's mean of squared gradients (Adam's ``exp_avg_sq``), an
                    estimate of the diagonal of the Fisher information. This is the growth of the loss up to a common factor
    weight-error    ``delta**2``, the squared change of the weight. With statistics of the inputs, times the mean square of the
                    input: the squared change of the output
    variance        LLM-PQ's (arXiv 2403.01136, section 4): ``scale**2 * Var(x) / 4``, the variance that rounding adds to the
                    output; without statistics of the inputs their variance counts as 1

Weights are read block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.quantise.modules import Unit
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import SECOND_MOMENT, VARIANCE, WEIGHT_ERROR, Scheme

MOMENT = "exp_avg_sq"
BLOCK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Inputs:
    """Statistics of the inputs of a module.

    Attributes:
        mean_square: mean square of each input, float32 ``[in]``.
        variance: variance of all inputs.
    """

    mean_square: torch.Tensor
    variance: float


@dataclass(frozen=True, slots=True)
class UnitErrors:
    """Errors of a unit.

    Attributes:
        unit: the modules.
        errors: predicted error by scheme.
        relative: norm of the change over the norm of the weights, by scheme.
    """

    unit: Unit
    errors: Mapping[Scheme, float]
    relative: Mapping[Scheme, float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured.

    Attributes:
        indicator: one of ``scheme.INDICATORS``.
        schemes: schemes to try; where one does not fit the shapes of a unit, the next that does (``Scheme.fitted``).
        dtype: dtype of scales, and of 16 bits; None: as stored.
        inputs: statistics by name of the module, or empty.
    """

    indicator: str
    schemes: Sequence[Scheme]
    dtype: torch.dtype | None
    inputs: Mapping[str, Inputs]


def has_moments(checkpoint: Checkpoint, units: Sequence[Unit]) -> bool:
    """Whether a checkpoint has the mean of squared gradients of all units."""
    return all(checkpoint.info(f"{module}.weight", MOMENT) is not None for unit in units for module in unit.modules)


def measure(
    checkpoint: Checkpoint,
    weights: Mapping[str, TensorInfo],
    units: Sequence[Unit],
    how: Measurement,
    progress: Callable[[int], None] = lambda _: None,
) -> list[UnitErrors]:
    """Round every weight with every scheme, and measure the errors.

    Args:
        checkpoint: checkpoint under the names of transformers' files.
        weights: weights by name.
        units: units of the model.
        how: indicator, schemes and statistics.
        progress: called with the number of bytes of weights that were read.

    Raises:
        MismatchError: the checkpoint has no second moments, or the inputs of a module are missing or have another size.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
    """
    if how.indicator == SECOND_MOMENT and not has_moments(checkpoint, units):
        raise MismatchError(
            f"{checkpoint.storage}: has no {MOMENT} of all weights, which the indicator {SECOND_MOMENT} needs; use "
            f"{WEIGHT_ERROR}"
        )
    found = []
    for unit in units:
        schemes = sorted({scheme.fitted(unit.shapes) for scheme in how.schemes})
        errors, changes = dict.fromkeys(schemes, 0.0), dict.fromkeys(schemes, 0.0)
        total = 0.0
        for module in unit.modules:
            info = weights[f"{module}.weight"]
            inputs = _inputs(module, info, how)
            for box in cut(Box.whole(info.shape), max(BLOCK_ELEMENTS, info.shape[1])):
                rows = checkpoint.read_box(info, box, verify="off").view(box.shape)
                weighing = _weighing(checkpoint, info, box, how, inputs)
                total += float(rows.double().square().sum())
                for scheme in errors:
                    change, error = _error(rows, scheme, how, weighing, inputs)
                    changes[scheme] += change
                    errors[scheme] += error
                progress(rows.numel() * rows.element_size())
        if not math.isfinite(total):
            raise MismatchError(f"{checkpoint.storage}: {unit.name} has values that are not finite")
        relative = {scheme: math.sqrt(change / total) if total else 0.0 for scheme, change in changes.items()}
        found.append(UnitErrors(unit, errors, relative))
    return found


def _inputs(module: str, info: TensorInfo, how: Measurement) -> Inputs | None:
    if not how.inputs or how.indicator == SECOND_MOMENT:
        return None
    found = how.inputs.get(module)
    if found is None or found.mean_square.shape != (info.shape[1],):
        raise MismatchError(f"the statistics of the inputs have none for the {info.shape[1]} inputs of {module}")
    return found


def _weighing(
    checkpoint: Checkpoint, info: TensorInfo, box: Box, how: Measurement, inputs: Inputs | None
) -> torch.Tensor | float:
    """Return the factor of the squared change of each value: ``[rows, in]``, ``[in]``, or one number."""
    if how.indicator == SECOND_MOMENT:
        moment = checkpoint.info(info.name, MOMENT)
        assert moment is not None, info.name  # has_moments
        return checkpoint.read_box(moment, box, verify="off").view(box.shape).double() / 2
    return 1.0 if inputs is None else inputs.mean_square.double()


def _error(
    rows: torch.Tensor, scheme: Scheme, how: Measurement, weighing: torch.Tensor | float, inputs: Inputs | None
) -> tuple[float, float]:
    """Return the squared change of the weights, and the predicted error."""
    dtype = how.dtype or rows.dtype
    scales = None
    if scheme.rounds:
        levels, scales = rounded(rows, scheme, dtype)
        after = restored(levels, scales)
    else:
        after = rows.to(dtype)
    squared = (after.double() - rows.double()).square()
    if how.indicator != VARIANCE:
        return float(squared.sum()), float((squared * weighing).sum())
    if scales is None:
        return float(squared.sum()), 0.0
    spread = 1.0 if inputs is None else inputs.variance
    values = rows.shape[1] // scales.shape[1]
    return float(squared.sum()), float(scales.double().square().sum()) * values * spread / 4
