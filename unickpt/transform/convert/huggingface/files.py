"""Names of the files of a transformers model folder, and its configuration."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.transform.convert.pickles.regular_files import read_json

INDEX, CONFIG, SINGLE = "model.safetensors.index.json", "config.json", "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")  # endings of weight files


def configuration(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; empty without a readable one."""
    with contextlib.suppress(OSError, FormatError):
        return dict(read_json(folder / CONFIG))
    return {}
