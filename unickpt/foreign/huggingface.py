"""Models of transformers: safetensors files with whole tensors."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__
from unickpt.converting import Part, Portion, Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.exporting import CONFIG, INDEX
from unickpt.foreign.located import Files, Located
from unickpt.fragments import Box, strides_of
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import Writer
from unickpt.safetensors_io import Header, header_bytes_of, parse_header
from unickpt.translated import HUGGINGFACE


def huggingface(folder: Path, files: Files) -> Source:
    """A model of transformers: weights, of step 0, without an optimizer.

    Args:
        folder: with safetensors files and ``config.json``.
        files: through which it is read.

    Raises:
        NotACheckpointError: no such files are there.
        FormatError: one of them is damaged or missing, or two have a tensor of one name.
    """
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise NotACheckpointError(f"{folder}: no safetensors files are there")
    _check_whole(folder, paths)
    seen: dict[str, Path] = {}
    portions = []
    for path in paths:
        header = _header(path)
        parts = []
        for slot in header.slots:
            if slot.name in seen:
                raise FormatError(f"{folder}: {slot.name} is in {seen[slot.name].name} and in {path.name}")
            seen[slot.name] = path
            at = header.header_bytes + slot.begin_byte
            found = Located(files, path, at, slot.dtype, slot.shape, strides_of(slot.shape))
            info = TensorInfo(slot.name, "weight", slot.dtype, slot.shape, "parameter")
            parts.append(Part(info, Box.whole(slot.shape), found.read))
        portions.append(Portion(path.name, parts, [path]))
    config = configuration(folder)
    version = str(config.get("transformers_version") or "")
    model = Model.of_config(config).as_json()
    writer = Writer("transformers", version, __version__, torch.__version__, HUGGINGFACE, {}, model)
    return Source("transformers", portions, writer)


def configuration(folder: Path) -> dict[str, Any]:
    """Of the model in a folder of transformers; nothing if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _check_whole(folder: Path, paths: Sequence[Path]) -> None:
    """All files that there should be are there, and no others."""
    strange = [path for path in paths if not path.is_file()]
    if strange:
        raise FormatError(f"{strange[0]}: is no file")
    names = {path.name for path in paths}
    index = folder / INDEX
    if index.is_file():
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise FormatError(f"{index}: cannot be read as an index ({err})") from None
        missing, more = sorted(map(str, listed - names)), sorted(names - listed)
    else:
        parts = [match for name in names if (match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.safetensors)", name))]
        wanted = {f"{m[1]}-{at:05d}-of-{m[3]}{m[4]}" for m in parts for at in range(1, int(m[3]) + 1)}
        missing, more = sorted(wanted - names), []
    if missing or more:
        told = f"{missing[0]} is not there" if missing else f"{more[0]} is not one of the files that {INDEX} lists"
        raise FormatError(f"{folder}: {told}: the model is not whole")


def _header(path: Path) -> Header:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = header_bytes_of(prefix, file_bytes=size, where=str(path))
        return parse_header(prefix + file.read(length - 8), file_bytes=size, where=str(path))
