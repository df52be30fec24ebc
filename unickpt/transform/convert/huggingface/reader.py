"""Reader of transformers models: folders of safetensors files with whole tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from unickpt import __version__
from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.checkpoint.format.boxes import strides_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.transform.convert.huggingface.files import INDEX, configuration, header_of
from unickpt.transform.convert.huggingface.model_files import files_of
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.regular_files import read_json
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE

# Files in a model folder that are not part of the model: peft adapters, and the same weights under Mistral's names.
_BESIDE = re.compile(r"(adapter_model|consolidated)(\.\d+|-\d{5}-of-\d{5})?\.safetensors")


@bounded
def huggingface(folder: Path, files: OpenFiles) -> Source:
    """Open a transformers model as a source: weights at step 0 and the model's other files, without an optimizer.

    Args:
        folder: directory with safetensors files and ``config.json``.
        files: open files to read through.

    Raises:
        NotACheckpointError: the folder has no safetensors files.
        FormatError: a file is damaged or missing, or two files contain a tensor of the same name, or weights
            are rounded and packed.
    """
    present = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not present:
        raise NotACheckpointError(f"{folder}: contains no safetensors files")
    paths = [path for path in present if not _BESIDE.fullmatch(path.name)] or present
    _check_whole(folder, paths)
    seen: dict[str, Path] = {}
    portions = []
    for path in paths:
        header = header_of(path)
        parts = []
        for slot in header.slots:
            if slot.name.endswith(".weight_packed"):
                raise FormatError(f"{folder}: has rounded weights ({slot.name}); convert the model that it was made from")
            if slot.name in seen:
                raise FormatError(f"{folder}: tensor {slot.name} is in both {seen[slot.name].name} and {path.name}")
            seen[slot.name] = path
            at = header.header_bytes + slot.begin_byte
            found = Located(files, path, at, slot.dtype, slot.shape, strides_of(slot.shape))
            info = TensorInfo(slot.name, "weight", slot.dtype, slot.shape, "parameter")
            parts.append(SourcePart.whole(info, found))
        portions.append(Portion(path.name, parts, [path]))
    config = configuration(folder)
    version = str(config.get("transformers_version") or "")
    model = Model.of_config(config).as_json()
    writer = Writer("transformers", version, __version__, torch.__version__, HUGGINGFACE, {}, model)
    kept = files_of(folder)
    left_out = [*(f"{path.name}: not a file of the model" for path in present if path not in paths), *kept.left_out]
    return Source("transformers", portions, writer, left_out=left_out, model_files=kept)


def _check_whole(folder: Path, paths: Sequence[Path]) -> None:
    """Raise FormatError unless the files are exactly those of the model."""
    strange = [path for path in paths if not path.is_file()]
    if strange:
        raise FormatError(f"{strange[0]}: is not a regular file")
    names = {path.name for path in paths}
    index = folder / INDEX
    if index.is_file():
        try:
            listed = set(read_json(index)["weight_map"].values())
        except (OSError, FormatError, KeyError, TypeError, AttributeError) as err:
            raise FormatError(f"{index}: not a valid safetensors index ({err})") from None
        missing, more = sorted(map(str, listed - names)), sorted(names - listed)
    else:
        parts = [match for name in names if (match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.safetensors)", name))]
        wanted = {f"{m[1]}-{at:05d}-of-{m[3]}{m[4]}" for m in parts for at in range(1, int(m[3]) + 1)}
        missing, more = sorted(wanted - names), []
    if missing or more:
        reason = f"{missing[0]} is missing" if missing else f"{more[0]} is not listed in {INDEX}"
        raise FormatError(f"{folder}: {reason}: the model is incomplete")
