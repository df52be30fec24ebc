"""Measured layers of earlier jobs, in a file of lines of JSON. A line that cannot be read is left out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.base.private_files import append, read_text
from unickpt.diagnosis.layer_costs.compute import key_of
from unickpt.diagnosis.layer_costs.measured import MeasuredLayer, as_text, layers_of

MOST_BYTES = 8 << 20  # newest part of the store that counts


def default_store() -> Path:
    """Return the store of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unickpt" / "layer-times.jsonl"


def remember(store: Path, layers: Sequence[MeasuredLayer]) -> None:
    """Add layers with a known device and size that the store does not have.

    Raises:
        FormatError: the file cannot be written.
    """
    known = {_key(each) for each in remembered(store)}
    fresh = {_key(each): each for each in layers if each.device and each.tokens and each.forward_s > 0}
    lines = [json.dumps(json.loads(as_text([each]))) + "\n" for key, each in fresh.items() if key not in known]
    if not lines:
        return
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        append(store, "".join(lines).encode())
    except OSError as err:
        raise FormatError(f"{store}: the store of measured layers cannot be written ({err})") from err


def remembered(store: Path) -> list[MeasuredLayer]:
    """Return the layers in the store; none if there is no store."""
    found = []
    for line in read_text(store, MOST_BYTES).splitlines():
        try:
            found += layers_of(json.loads(line), str(store))
        except (ValueError, RecursionError, FormatError):
            continue
    return found


def _key(layer: MeasuredLayer) -> tuple[object, ...]:
    """Return what makes two measurements the same one, with times of three digits."""
    return *key_of(layer), layer.tokens, layer.parameters, f"{layer.forward_s:.2e}", f"{layer.backward_s:.2e}"
