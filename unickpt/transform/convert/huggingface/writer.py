"""Writer of transformers models: the weights of a checkpoint as ordinary safetensors files, one block at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.safetensors_header import build_header
from unickpt.checkpoint.load.checked_read import bytes_of
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import BLOCK_ELEMENTS
from unickpt.transform.convert.exported import Exported
from unickpt.transform.convert.huggingface.files import CONFIG, INDEX, SINGLE, WEIGHTS, configuration
from unickpt.transform.convert.huggingface.model_files import CODE, copy_model_files
from unickpt.transform.dialects.hf_layouts import in_files
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import choose
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, shapes_of, translated
from unickpt.transform.dialects.translation import counterpart_shapes
from unickpt.transform.quantise.encoding import CastEncoding, Encoding, is_float

_ADAPTER = re.compile(r"(^|\.)lora_|\.modules_to_save\.|^base_model\.model\.")
_METADATA = {"format": "pt"}  # transformers requires it
_AS_STORED = CastEncoding()


@dataclass(frozen=True)
class ExportedModel(Exported):
    """An exported model.

    Attributes:
        tied: tied names, which are not written: transformers ties them by its configuration.
        without_config: whether the folder has no ``config.json``, which transformers requires.
        copied: names of the configuration and tokenizer files that were copied.
        left: names of files in the configuration folder that were not copied, apart from weights.
        needs_code: whether the configuration names Python code (``auto_map``) that was not copied.
    """

    tied: tuple[str, ...] = ()
    without_config: bool = False
    copied: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    needs_code: bool = False


def as_huggingface(checkpoint: Checkpoint, *, chosen: str = "", config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Return a checkpoint under the names of transformers, described by the checkpoint and its configuration alone.

    Args:
        checkpoint: checkpoint of any supported dialect.
        chosen: model family, or path of a dialect file, if neither checkpoint nor configuration gives the family.
        config: configuration of the model, as transformers writes it.

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: the configuration describes another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == HUGGINGFACE:
        return checkpoint
    where = str(checkpoint.storage)
    model = Model.of_config(config or {}).with_more(Model.from_json(stored.model), where)
    found = choose(stored.dialect, HUGGINGFACE, chosen, model.family, where=where, option="--dialect", config="--config")
    rules = found.of_model(model.facts)
    sizes = rules.sizes_of(model.facts)
    given, _ = shapes_of(checkpoint)
    view = translated(checkpoint, rules.rules, counterpart_shapes(rules.rules, given, sizes, outward=True), sizes, outward=True)
    if view.untranslated:
        raise MismatchError(f"{where}: transformers has no counterpart for {', '.join(view.untranslated[:8])}")
    return view


def export(
    checkpoint: Checkpoint, folder: Path, *, config_from: Path | None = None, with_code: bool = False,
    encoding: Encoding = _AS_STORED, settings: Mapping[str, Any] | None = None, shard_bytes: int = 5 << 30,
    progress: Callable[[int], None] = lambda _: None,
) -> ExportedModel:  # fmt: skip
    """Write a folder that ``from_pretrained`` loads.

    Weight files are renamed to their final names after all of them are written. An interrupted export leaves no model.

    Args:
        checkpoint: checkpoint under the names of transformers (``as_huggingface``). Experts are written one by one
            (``hf_layouts.py``).
        folder: output directory. It must not contain a model.
        config_from: folder of a model of the same kind, or None. Its configuration and tokenizer files are copied. ``dtype``
            in the copied ``config.json`` is set to that of the weights, as ``save_pretrained`` does.
        with_code: also copy Python files (models with ``trust_remote_code``).
        encoding: how tensors are written: as stored, cast, or rounded to few bits.
        settings: written into the copied ``config.json``, in place of its own.
        shard_bytes: maximum file size in bytes. A single larger tensor gets a file of its own.
        progress: called with the number of bytes read from the checkpoint, in the dtype of the tensors.

    Raises:
        MismatchError: the folder contains a model, or the checkpoint has no weights, excluded weights, or peft adapters.
        LanguageError: the number of experts is unknown.
        UnsafePathError: a file of ``config_from`` is a symbolic link that leaves that folder.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: the folder cannot be written.
    """
    check_no_model(folder)
    checkpoint = in_files(checkpoint)
    infos = weights(checkpoint)
    _check_adapters(checkpoint, infos)
    if checkpoint.manifest.excluded:
        some = ", ".join(checkpoint.manifest.excluded[:8])
        raise MismatchError(
            f"{checkpoint.storage}: the checkpoint was saved without {some}. Save it without exclude_frozen_parameters"
        )
    if not infos:
        raise MismatchError(f"{checkpoint.storage}: the checkpoint has no weights")
    shards = _sharded(infos, encoding, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = [folder / f"{name}.part" for name in names]
    try:
        sizes = [_write(checkpoint, path, shard, encoding, progress) for path, shard in zip(fresh, shards, strict=True)]
        dtypes = {encoding.dtype(info) for info in infos if is_float(info)}
        copied, left = copy_model_files(config_from, folder, with_code)
        _adjust(folder, dtypes if copied else set(), settings or {})
        for path, name in zip(fresh, names, strict=True):
            path.replace(folder / name)
    except BaseException:
        for path in fresh:
            path.unlink(missing_ok=True)
        raise
    if len(names) > 1:
        placed = [(info, name) for name, shard in zip(names, shards, strict=True) for info in shard]
        place = {slot[0]: name for info, name in placed for slot in encoding.slots(info)}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(place.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    config = configuration(folder)
    needs_code = "auto_map" in config and not any(folder.glob(CODE))
    tied = tuple(sorted(checkpoint.manifest.aliases))
    return ExportedModel(folder, len(infos), sum(sizes), tuple(names), (), tied, not config, copied, left, needs_code)


def check_no_model(folder: Path) -> None:
    """Raise MismatchError if a folder already contains weights."""
    present = sorted(path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS)) if folder.is_dir() else []
    if present:
        raise MismatchError(f"{folder}: already contains a model ({present[0]}). Choose another folder, or empty this one")


def _check_adapters(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> None:
    """Raise MismatchError for a peft checkpoint: transformers would ignore its names and start with random weights."""
    adapters = [info.name for info in infos if _ADAPTER.search(info.name)]
    if not adapters:
        return
    where = checkpoint.storage
    frozen = bool(checkpoint.manifest.excluded)
    base = "Convert the base model ('unickpt convert BASE_MODEL BASE'), then merge" if frozen else "Merge"
    more, config = (" --lora-base BASE", "") if frozen else ("", " --config BASE_MODEL")
    beside = Path(str(where)).parent  # checkpoint-N of Trainer has the configuration of the adapters
    adapter = beside if (beside / "adapter_config.json").is_file() else "ADAPTER_FOLDER"
    raise MismatchError(
        f"{where}: contains peft adapters ({adapters[0]}), which transformers would ignore. {base}: 'unickpt edit "
        f"{where} MERGED --merge-lora --lora-config {adapter}{more}'; then 'unickpt export MERGED OUT{config}'. The adapters "
        f"alone: 'unickpt export {where} OUT --to peft'"
    )


def _adjust(folder: Path, dtypes: set[str], settings: Mapping[str, Any]) -> None:
    """Write settings, and the dtype if all weights have one, into the configuration of a folder; nothing without one."""
    config = configuration(folder)
    other = {key: value for key, value in settings.items() if config.get(key) != value} if config else {}
    if len(dtypes) == 1:
        stored = str(torch_dtype(next(iter(dtypes)))).removeprefix("torch.")
        other |= {key: stored for key in ("dtype", "torch_dtype") if config.get(key, stored) != stored}
    if other:
        (folder / CONFIG).write_text(json.dumps({**config, **other}, indent=2) + "\n", encoding="utf-8")


def weights(checkpoint: Checkpoint) -> list[TensorInfo]:
    """Return the weight of every parameter and buffer, or the master of a parameter without a weight."""
    found: dict[str, TensorInfo] = {}
    for info in checkpoint.index.tensors:
        if info.kind in ("parameter", "buffer") and (info.state == "weight" or info.name not in found):
            found[info.name] = info
    return sorted(found.values(), key=lambda info: info.name)


def _sharded(infos: Sequence[TensorInfo], encoding: Encoding, limit: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        added = build_header(encoding.slots(info), {})[1].slots[-1].end_byte
        if shards[-1] and size + added > limit:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += added
    return shards


def _write(
    checkpoint: Checkpoint,
    path: Path,
    infos: Sequence[TensorInfo],
    encoding: Encoding,
    progress: Callable[[int], None],
) -> int:
    """Write one file. Return the bytes of its tensors.

    Tensors with the largest elements are the first, so that each one is aligned: readers map files into memory.
    """
    slots = sorted((slot for info in infos for slot in encoding.slots(info)), key=lambda slot: -itemsize_bytes(slot[1]))
    text, header = build_header(slots, _METADATA)
    begin = {slot.name: header.header_bytes + slot.begin_byte for slot in header.slots}
    with path.open("wb") as file:
        file.write(text)
        for info in infos:
            at = [begin[name] for name, _, _ in encoding.slots(info)]
            for slot, data in encoding.data(info, partial(_read, checkpoint, info, progress), BLOCK_ELEMENTS):
                file.seek(at[slot])
                at[slot] += file.write(bytes_of(data))
    return header.slots[-1].end_byte


def _read(checkpoint: Checkpoint, info: TensorInfo, progress: Callable[[int], None], box: Box) -> torch.Tensor:
    data = checkpoint.read_box(info, box, verify="off")
    progress(data.numel() * data.element_size())
    return data
