"""One measured layer of a model, and the JSON that holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError

SUFFIX = ".layers.json"  # of the file of a rank, beside its ring
EMBEDDING, LAYER, LOSS = "embedding", "layer", "loss"
ROLES = (EMBEDDING, LAYER, LOSS)
_NUMBERS = ("forward_s", "backward_s", "parameters", "activation_bytes", "input_bytes", "tokens")


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One layer of the whole model. Times and sizes are those of one rank.

    Attributes:
        name: name of the module.
        role: of ``ROLES``. An embedding is before all layers and the loss, with the output projection, after them.
        forward_s, backward_s: median time for one microbatch.
        parameters: number of parameters on a rank.
        activation_bytes: memory that the layer keeps for each microbatch from its forward to its backward computation.
        input_bytes: size of its first input: what a pipeline sends to the stage that begins with it.
        tokens: product of all sizes of its first input but the last.
        kind: name of its class.
        device: name of the kind of device that it was measured on.
        dtype: data type that it computes in, such as ``bfloat16``; '' if unknown.
    """

    name: str
    role: str
    forward_s: float
    backward_s: float
    parameters: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    tokens: int = 0
    kind: str = ""
    device: str = ""
    dtype: str = ""


def layers_of(document: Any, where: str) -> list[MeasuredLayer]:
    """Return the layers of a file.

    Args:
        document: parsed JSON: ``{"layers": [{"name", "role", "forward_s", ...}, ...]}``.
        where: file, for messages.

    Raises:
        FormatError: it is not such a document.
    """
    rows = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise FormatError(f'{where}: expected a JSON object with "layers", a list that is not empty')
    device = document.get("device", "")
    return [_layer(row, device if isinstance(device, str) else "", f"{where}, layer {at}") for at, row in enumerate(rows)]


def _layer(row: Any, device: str, where: str) -> MeasuredLayer:
    if not isinstance(row, dict):
        raise FormatError(f"{where}: expected an object, found {type(row).__name__}")
    shape = row.get("shape")
    if isinstance(shape, list) and all(type(each) is int for each in shape):
        row = {"tokens": math.prod(shape[:-1]), **row}
    values = [row.get(name, 0) for name in _NUMBERS]
    for name, value in zip(_NUMBERS, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise FormatError(f"{where}: {name} must be a number from 0, not {value!r}")
    name, role = row.get("name", ""), row.get("role", LAYER)
    if not isinstance(name, str) or role not in ROLES:
        raise FormatError(f"{where}: name must be text and role one of {', '.join(ROLES)}, not {name!r} and {role!r}")
    kind, device, dtype = (str(row.get(key, other)) for key, other in (("kind", ""), ("device", device), ("dtype", "")))
    forward_s, backward_s, *sizes = values
    parameters, activation_bytes, input_bytes, tokens = map(int, sizes)
    return MeasuredLayer(
        name, role, float(forward_s), float(backward_s), parameters, activation_bytes, input_bytes, tokens, kind, device, dtype
    )


def as_text(layers: Iterable[MeasuredLayer]) -> str:
    """Return the JSON document of ``layers_of``."""
    rows = [{name: getattr(layer, name) for name in layer.__slots__} for layer in layers]
    return json.dumps({"schema": 1, "layers": rows}, indent=1)
