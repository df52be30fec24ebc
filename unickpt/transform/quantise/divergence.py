"""Measured errors of rounding: how far the outputs of a model move if one unit of weights is rounded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.transform.quantise.modules import Unit, units_of
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme

DIVERGENCE = "divergence"  # name of the indicator
SCHEMA, WHOLE = 1, Scheme(16)


@torch.no_grad()
def measure_rounding(
    model: torch.nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    output: str | os.PathLike[str],
    *,
    schemes: Sequence[str] = ("4", "8"),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, dict[str, float]]:
    """Round each unit of a model alone with each scheme, and measure how far the outputs move. Then restore the weights.

    Example:
        A few thousand tokens are enough::

            unickpt.measure_rounding(model, sample, "errors.json", schemes=("4", "4/32", "8"))
            unickpt.plan_bits("out/step100", 5_500_000_000, errors="errors.json", schemes=("4", "4/32", "8"))

    Args:
        model: a model of transformers, on any device. It runs once for each unit and scheme.
        batches: keyword arguments of its calls, batches of one size. Their outputs ``logits`` are kept in memory, in float32.
            If they have ``labels``, the growth of the output ``loss`` is added to the error, which may then be negative.
        output: file that gets the errors, as JSON.
        schemes: schemes to measure. 16 bits have no error.
        dtype: dtype of the scales.

    Returns:
        By unit and scheme, the Kullback-Leibler divergence of the rounded model from the whole one: nats for each row of the
        logits, on average; plus the growth of the loss.

    Raises:
        ConfigError: a scheme has another form.
        OSError: ``output`` cannot be written.
    """
    wanted = [Scheme.parse(text) for text in schemes]
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    sample = [dict(batch) for batch in batches]
    whole = list(_outputs(model, sample))
    rows = sum(scores.shape[:-1].numel() for scores, _ in whole)
    found: dict[str, dict[str, float]] = {}
    for unit in units_of((name, weight.shape) for name, weight in weights.items()):
        found[unit.name] = {}
        for scheme in sorted({scheme.fitted(unit.shapes) for scheme in wanted} - {WHOLE}):
            with _rounded(unit, weights, scheme, dtype):
                pairs = ((*old, *new) for old, new in zip(whole, _outputs(model, sample), strict=True))
                apart = [(_divergence(scores, other), after - loss) for scores, loss, other, after in pairs]
            divergence = math.fsum(each for each, _ in apart) / max(rows, 1)
            growth = math.fsum(each for _, each in apart) / max(len(apart), 1)
            found[unit.name][str(scheme)] = max(divergence, 0.0) + growth
    Path(output).write_text(json.dumps({"schema": SCHEMA, "errors": found}, indent=1) + "\n")
    return found


def _outputs(model: torch.nn.Module, sample: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the log-probabilities of each batch, float32 ``[..., vocabulary]``, and its loss; 0 without labels."""
    for batch in sample:
        found = model(**batch)
        yield found.logits.float().log_softmax(-1), float(found.loss) if "labels" in batch else 0.0


def _divergence(whole: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the sum of the divergences of all rows."""
    return float((whole.exp() * (whole - scores)).sum(-1).double().sum())


@contextmanager
def _rounded(unit: Unit, weights: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> Iterator[None]:
    own = [weights[f"{module}.weight"] for module in unit.modules]
    before = [weight.clone() for weight in own]
    try:
        for weight in own:
            weight.copy_(restored(*rounded(weight, scheme, dtype)))
        yield
    finally:
        for weight, old in zip(own, before, strict=True):
            weight.copy_(old)


def errors_of(document: Mapping[str, Any], where: str) -> dict[str, dict[str, float]]:
    """Return the errors by unit and scheme of a document that ``measure_rounding`` wrote.

    Args:
        document: the JSON object.
        where: its file, for messages.

    Raises:
        FormatError: it is another document.
    """
    errors = document.get("errors") if document.get("schema") == SCHEMA else None
    if not isinstance(errors, dict) or not all(isinstance(own, dict) for own in errors.values()):
        raise FormatError(f"{where}: has no errors of measure_rounding")
    values = [value for own in errors.values() for value in own.values()]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise FormatError(f"{where}: has errors that are not finite numbers")
    return errors
