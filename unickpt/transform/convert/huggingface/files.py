"""Names of the files of a transformers model folder, its configuration, and the headers of its weight files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.safetensors_header import Header, header_bytes_of, parse_header
from unickpt.transform.convert.pickles.regular_files import open_regular, read_json

INDEX, CONFIG, SINGLE = "model.safetensors.index.json", "config.json", "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")  # endings of weight files


def configuration(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; empty without a readable one."""
    with contextlib.suppress(OSError, FormatError):
        return dict(read_json(folder / CONFIG))
    return {}


def header_of(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        FormatError: the file has none, or is not a regular file.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = header_bytes_of(prefix, file_bytes=size, where=str(path))
        return parse_header(prefix + file.read(length - 8), file_bytes=size, where=str(path))
