"""A checkpoint's weights as a model of transformers: ordinary safetensors files, written one block after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.differences import BLOCK_ELEMENTS
from unickpt.dtypes import name_of
from unickpt.errors import MismatchError
from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.language.shipped import choose
from unickpt.language.translation import listed
from unickpt.loading import Checkpoint
from unickpt.reading import bytes_of
from unickpt.safetensors_io import build_header
from unickpt.spellings import in_files
from unickpt.translated import HUGGINGFACE, shapes_of, translated

INDEX, CONFIG, SINGLE = "model.safetensors.index.json", "config.json", "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")
_METADATA = {"format": "pt"}  # transformers asks for it


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        files: names of the files with weights.
        tensors: how many.
        size_bytes: of them.
        tied: names that are left out, for they are the same as others: transformers ties them by its configuration.
        without_config: transformers needs a ``config.json`` beside them, and none was given.
    """

    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    tied: tuple[str, ...]
    without_config: bool


def as_huggingface(checkpoint: Checkpoint, *, chosen: str = "", config: Mapping[str, Any] | None = None) -> Checkpoint:
    """A checkpoint under the names of transformers, of a model that only the checkpoint describes.

    Args:
        checkpoint: of whatever framework.
        chosen: family, or file of a dialect, where neither checkpoint nor configuration tells.
        config: of the model, as transformers writes it.

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: the configuration is of another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == HUGGINGFACE:
        return checkpoint
    where = str(checkpoint.storage)
    model = Model.of_config(config or {}).with_more(Model.from_json(stored.model), where)
    rules = choose(stored.dialect, HUGGINGFACE, chosen, model.family, where=where, option="--dialect").of_model(model.facts)
    sizes = rules.sizes_of(model.facts)
    given, _ = shapes_of(checkpoint)
    view = translated(checkpoint, rules.rules, listed(rules.rules, given, sizes, outward=True), sizes, outward=True)
    if view.untranslated:
        raise MismatchError(f"{where}: transformers has no counterpart of {', '.join(view.untranslated[:8])}")
    return view


def export(
    checkpoint: Checkpoint, folder: Path, *, config_from: Path | None = None, dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30, verify: str = "off", progress: Callable[[int], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Write a folder that ``from_pretrained`` loads.

    Args:
        checkpoint: under the names of transformers (``as_huggingface``). Files name experts one by one (``spellings.py``).
        folder: that is made; there is no model in it yet.
        config_from: folder of a model of that kind: everything in it but weights is copied (configuration, tokenizer).
        dtype: of all floating point weights; as they are stored if not given.
        shard_bytes: of a file, at most, but for a single tensor.
        verify: what is read against its checksum. Tensors are read a block at a time; ``always`` would read a large
            fragment again for each.
        progress: called with the bytes that were written.

    Raises:
        MismatchError: the folder holds a model, or the checkpoint no weights.
        LanguageError: how many experts there are is not known.
        CorruptCheckpointError, StorageError: damaged or unreadable.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS))
    if present:
        raise MismatchError(f"{folder}: holds a model already ({present[0]}); name another folder, or empty it")
    checkpoint = in_files(checkpoint)
    infos = _weights(checkpoint)
    if checkpoint.manifest.excluded:
        some = ", ".join(checkpoint.manifest.excluded[:8])
        raise MismatchError(f"{checkpoint.storage}: was saved without {some}: no whole model can be made of it")
    if not infos:
        raise MismatchError(f"{checkpoint.storage}: has no weights")
    shards = _sharded(infos, dtype, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)
    ]  # fmt: skip
    place: dict[str, str] = {}
    total = 0
    for name, shard in zip(names, shards, strict=True):
        total += _write(checkpoint, folder / name, shard, dtype, verify, progress)
        place |= {info.name: name for info in shard}
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    if config_from is not None:
        for path in sorted(config_from.iterdir()):
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copy(path, folder / path.name)
    missing = not (folder / CONFIG).is_file()
    return Exported(tuple(names), len(infos), total, tuple(sorted(checkpoint.manifest.aliases)), missing)


def _weights(checkpoint: Checkpoint) -> list[TensorInfo]:
    """The weight of every parameter and buffer; its master where it has none."""
    found: dict[str, TensorInfo] = {}
    for info in checkpoint.index.tensors:
        if info.kind in ("parameter", "buffer") and (info.state == "weight" or info.name not in found):
            found[info.name] = info
    return sorted(found.values(), key=lambda info: info.name)


def _dtype(info: TensorInfo, dtype: torch.dtype | None) -> str:
    floats = info.dtype.startswith(("F", "BF"))
    return info.dtype if dtype is None or not floats else name_of(dtype)


def _sharded(infos: Sequence[TensorInfo], dtype: torch.dtype | None, limit: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        (slot,) = build_header([(info.name, _dtype(info, dtype), info.shape)], {})[1].slots
        if shards[-1] and size + slot.end_byte > limit:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += slot.end_byte
    return shards


def _write(
    checkpoint: Checkpoint, path: Path, infos: Sequence[TensorInfo], dtype: torch.dtype | None, verify: str,
    progress: Callable[[int], None],
) -> int:  # fmt: skip
    """One file; it bears its name only when it is whole. Returns the bytes of its tensors."""
    text, header = build_header(((info.name, _dtype(info, dtype), info.shape) for info in infos), _METADATA)
    fresh = path.with_name(f"{path.name}.part")
    try:
        with fresh.open("wb") as file:
            file.write(text)
            for info in infos:
                for box in cut(Box.whole(info.shape), BLOCK_ELEMENTS) if info.numel else ():
                    data = checkpoint.read_box(info, box, verify=verify)
                    data = data if dtype is None or not data.is_floating_point() else data.to(dtype)
                    file.write(bytes_of(data))
                    progress(data.numel() * data.element_size())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return header.slots[-1].end_byte
