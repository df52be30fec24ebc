"""Writer of adapters for peft: the two files of ``PeftModel.save_pretrained``, from a checkpoint of any training loop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.convert.exported import Exported
from unickpt.transform.edit.cast import is_float
from unickpt.transform.edit.merge_lora import ADAPTER_CONFIG, PREFIX, SAVED, LoraConfig, split_adapters
from unickpt.transform.edit.select import NoOptimizer
from unickpt.transform.edit.table import Table, TableEntry

ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterSettings:
    """What ``adapter_config.json`` shall have.

    Attributes:
        file: the file that is copied, or None: a new one, with what shapes and names say and the other attributes.
        alpha: ``lora_alpha``.
        rslora: ``use_rslora``.
        base: ``base_model_name_or_path``; '' for none.
    """

    file: Path | None = None
    alpha: float = 0.0
    rslora: bool = False
    base: str = ""


def export_adapter(
    table: Table,
    folder: Path,
    settings: AdapterSettings,
    *,
    adapter: str = "",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a folder that ``PeftModel.from_pretrained`` loads. Adapters are small: they are read as a whole.

    Args:
        table: the checkpoint.
        folder: output directory, without an adapter.
        settings: of ``adapter_config.json``.
        adapter: name of the adapter; '' if there is only one.
        dtype: dtype of the floating point tensors; None: as stored.
        progress: called with the number of bytes that were read.

    Raises:
        MismatchError: the folder has an adapter, the checkpoint has none or several, or the configuration is of others.
        FormatError: the configuration cannot be read.
        OSError: the folder cannot be written.
    """
    if (folder / ADAPTER).exists() or (folder / ADAPTER_CONFIG).exists():
        raise MismatchError(f"{folder}: already contains an adapter. Choose another folder, or empty this one")
    trained = {entry.info.name for entry in table.tensors() if entry.info.kind == "optimizer"}
    pairs, rest, name = split_adapters(NoOptimizer().apply(table), adapter)
    ranks = {_inner(module): a.info.shape[0] for module, (a, _, _) in pairs.items()}
    whole = {own: entry for entry in rest if (own := _saved_name(entry.info.name, name))}
    config = _configuration(table, settings, ranks, sorted({own.rpartition(".")[0] for own in whole}))
    entries = {f"{PREFIX}{own}": entry for own, entry in whole.items()}
    for module, (a, b, embedding) in pairs.items():
        for half, entry in (("A", a), ("B", b)):
            last = f"lora_embedding_{half}" if embedding else f"lora_{half}.weight"
            entries[f"{PREFIX}{_inner(module)}.{last}"] = entry
    tensors = {}
    for key, entry in entries.items():
        tensors[key] = _read(entry, dtype)
        progress(entry.info.size_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{ADAPTER}.part"
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / ADAPTER)
    finally:
        part.unlink(missing_ok=True)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    besides = sorted({entry.info.name for entry in rest if entry.info.name in trained} - {e.info.name for e in whole.values()})
    notes = [f"trained besides the adapter, and not in it: {some(besides)}"] if besides else []
    if settings.file is None:
        scaling = f"lora_alpha {settings.alpha:g}{' with use_rslora' if settings.rslora else ''}"
        notes.append(f"{ADAPTER_CONFIG} is made of names, shapes and {scaling}; what these do not show has peft's default")
    return Exported(folder, len(tensors), size, (ADAPTER,), tuple(notes))


def _read(entry: TableEntry, dtype: torch.dtype | None) -> torch.Tensor:
    found = entry.read(Box.whole(entry.info.shape)).view(entry.info.shape)
    return (found.to(dtype) if dtype is not None and is_float(entry.info.dtype) else found).contiguous()


def _inner(name: str) -> str:
    """Return a name in the model without peft, also if peft's model is a part of another module."""
    return name.rpartition(PREFIX)[2]


def _saved_name(name: str, adapter: str) -> str:
    """Return the name in the model of a parameter that the adapter has of its own (``modules_to_save``); '' of another."""
    module, saved, parameter = name.partition(SAVED)
    own, _, last = parameter.partition(".")
    return f"{_inner(module)}.{last}" if saved and own == adapter else ""


def _configuration(table: Table, settings: AdapterSettings, ranks: dict[str, int], saved: list[str]) -> dict[str, Any]:
    """Return the configuration of the file, checked against the adapters, or one that describes them."""
    if settings.file is not None:
        checked = LoraConfig.read(settings.file)
        for module, rank in ranks.items():
            checked.scaling(module, rank, table.where)
        file = settings.file / ADAPTER_CONFIG if settings.file.is_dir() else settings.file
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {**found, "inference_mode": True}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    known = {_inner(each).removesuffix(".weight") for each in (*table.shapes(), *table.aliases, *table.excluded)}
    return {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": settings.base or None, "inference_mode": True,
        "r": usual, "rank_pattern": {module: rank for module, rank in sorted(ranks.items()) if rank != usual},
        "lora_alpha": alpha, "use_rslora": settings.rslora, "bias": "none", "lora_dropout": 0.0,
        "target_modules": _targets(ranks, known), "modules_to_save": saved or None,
    }  # fmt: skip


def _targets(modules: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return what peft finds these modules by: the last parts of their names, if no other known module has them."""
    adapted = set(modules)
    last = {module.rpartition(".")[2] for module in adapted}
    others = {name.replace(".base_layer", "") for name in known if "lora_" not in name} - adapted
    return sorted(adapted) if any(name.rpartition(".")[2] in last for name in others) else sorted(last)
