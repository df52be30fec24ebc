"""``unickpt inspect`` of a model folder with rounded weights, as ``unickpt export --to vllm`` writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unickpt.base.errors import UnickptError
from unickpt.cli.output import Output, human_bytes
from unickpt.transform.convert.huggingface.rounded_model import RoundedModel, RoundedModule, rounded_model

_SHOWN_MODULES = 40


def model_at(directory: str) -> RoundedModel | None:
    """Return the model of a folder with rounded weights, or None.

    Raises:
        FormatError: its files are malformed.
        UnickptError: a file cannot be read.
    """
    folder = Path(directory)
    try:
        return rounded_model(folder) if folder.is_dir() else None
    except OSError as err:
        raise UnickptError(f"{directory}: cannot be read ({err})") from err


def document(directory: str, model: RoundedModel, pattern: re.Pattern[str] | None) -> dict[str, Any]:
    """Return the part of the JSON document."""
    modules = [
        {"name": m.name, "bits": m.scheme.bits, "group": m.scheme.group or None, "shape": m.shape, "bytes": m.size_bytes}
        for m in _matching(model, pattern)
    ]
    return {
        "directory": directory,
        "format": model.format,
        "total_bytes": model.size_bytes,
        "modules": modules,
        "others": model.others,
    }


def show(out: Output, directory: str, model: RoundedModel, pattern: re.Pattern[str] | None, *, show_all: bool) -> None:
    """Print the model."""
    out.line(f"model {directory}", style="bold")
    out.line(f"weights in the compressed-tensors format ({model.format}), {human_bytes(model.size_bytes)}")
    rows: list[tuple[object, ...]] = []
    for scheme in sorted({each.scheme for each in model.modules}):
        own = [each for each in model.modules if each.scheme == scheme]
        values, size = sum(m.shape[0] * m.shape[1] for m in own), sum(each.size_bytes for each in own)
        rows.append((str(scheme), len(own), values, size, f"{8 * size / max(values, 1):.2f}"))
    out.table("rounded weights", ["bits/group", "modules", "values", "bytes", "bits per value with scales"], rows)
    out.table("all other tensors", ["dtype", "bytes"], [(dtype, size) for dtype, size in sorted(model.others.items())])
    found = _matching(model, pattern)
    shown = found if show_all else found[:_SHOWN_MODULES]
    out.table(
        f"modules with rounded weights ({len(found):,})",
        ["name", "bits/group", "shape", "bytes"],
        [(each.name, str(each.scheme), list(each.shape), each.size_bytes) for each in shown],
    )
    if len(shown) < len(found):
        out.line(f"and {len(found) - len(shown):,} more: --all shows them, --grep REGEX selects")


def _matching(model: RoundedModel, pattern: re.Pattern[str] | None) -> Sequence[RoundedModule]:
    return [each for each in model.modules if pattern is None or pattern.search(each.name)]
