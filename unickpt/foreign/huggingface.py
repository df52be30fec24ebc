"""Models of transformers: safetensors files with whole tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from unickpt import __version__
from unickpt.converting import Part, Portion, Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.exporting.huggingface import INDEX
from unickpt.exporting.huggingface import configuration as configuration
from unickpt.foreign.limits import bounded
from unickpt.foreign.located import Files, Located
from unickpt.fragments import Box, strides_of
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import Writer
from unickpt.regular_files import open_regular, read_json
from unickpt.safetensors_io import Header, header_bytes_of, parse_header
from unickpt.translated import HUGGINGFACE

# Files beside a model that do not belong to it: adapters of peft, and the same weights under Mistral's own names.
_BESIDE = re.compile(r"(adapter_model|consolidated)(\.\d+|-\d{5}-of-\d{5})?\.safetensors")


@bounded
def huggingface(folder: Path, files: Files) -> Source:
    """A model of transformers: weights at step 0, without an optimizer.

    Args:
        folder: holds safetensors files and ``config.json``.
        files: reads the files.

    Raises:
        NotACheckpointError: there are no safetensors files.
        FormatError: a file is damaged or missing, or two files have a tensor of the same name.
    """
    present = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not present:
        raise NotACheckpointError(f"{folder}: there are no safetensors files")
    paths = [path for path in present if not _BESIDE.fullmatch(path.name)] or present
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
    left_out = [f"{path.name}: not a file of the model" for path in present if path not in paths]
    return Source("transformers", portions, writer, left_out=left_out)


def _check_whole(folder: Path, paths: Sequence[Path]) -> None:
    """Raise FormatError unless the folder has exactly the files of the model."""
    strange = [path for path in paths if not path.is_file()]
    if strange:
        raise FormatError(f"{strange[0]}: is not a regular file")
    names = {path.name for path in paths}
    index = folder / INDEX
    if index.is_file():
        try:
            listed = set(read_json(index)["weight_map"].values())
        except (OSError, FormatError, KeyError, TypeError, AttributeError) as err:
            raise FormatError(f"{index}: is not an index of a model ({err})") from None
        missing, more = sorted(map(str, listed - names)), sorted(names - listed)
    else:
        parts = [match for name in names if (match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.safetensors)", name))]
        wanted = {f"{m[1]}-{at:05d}-of-{m[3]}{m[4]}" for m in parts for at in range(1, int(m[3]) + 1)}
        missing, more = sorted(wanted - names), []
    if missing or more:
        told = f"{missing[0]} is not there" if missing else f"{more[0]} is not one of the files that {INDEX} lists"
        raise FormatError(f"{folder}: {told}: the model is not whole")


def _header(path: Path) -> Header:
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = header_bytes_of(prefix, file_bytes=size, where=str(path))
        return parse_header(prefix + file.read(length - 8), file_bytes=size, where=str(path))
