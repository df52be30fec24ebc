"""Universal checkpoints for plain PyTorch: FSDP2, HSDP, tensor parallelism, DDP, and one process.

``import torch_unickpt`` imports only the standard library. A name is imported on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_unickpt.dcp.storage import UnickptReader, UnickptWriter
    from torch_unickpt.loading.load_training import StartingPoint, load_training, resume_or_start
    from torch_unickpt.saving.save_training import save_training
    from torch_unickpt.witnessing.watch import witness
    from unickpt.api.witness import Witness
    from unickpt.base.options.job import MemoryOptions

_MODULES = {
    "unickpt.base.options.job": ("MemoryOptions",),
    "torch_unickpt.dcp.storage": ("UnickptReader", "UnickptWriter"),
    "torch_unickpt.loading.load_training": ("StartingPoint", "load_training", "resume_or_start"),
    "torch_unickpt.saving.save_training": ("save_training",),
    "torch_unickpt.witnessing.watch": ("witness",),
    "unickpt.api.witness": ("Witness",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "MemoryOptions",
    "StartingPoint",
    "UnickptReader",
    "UnickptWriter",
    "Witness",
    "load_training",
    "resume_or_start",
    "save_training",
    "witness",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
