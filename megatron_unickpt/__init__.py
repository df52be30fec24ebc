"""The Megatron adapter: ``--ckpt-format unickpt``, or a strategy for ``dist_checkpointing``.

Importing this package prepares the hooks; ``unickpt.base.autoload`` does the same at ``import torch``. Each hook is installed
when its Megatron module is imported. A job that does not select unickpt runs Megatron's own code, and can load unickpt
checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unickpt.base import autoload

if TYPE_CHECKING:
    from megatron_unickpt.api import load, resume_or_start, save
    from megatron_unickpt.dist_checkpointing.strategies import UnickptLoadStrategy, UnickptSaveStrategy
    from megatron_unickpt.edge import RUNTIME
    from megatron_unickpt.framework.errors import MegatronCheckpointError, MegatronSaveError
    from megatron_unickpt.held_state.optimizer import METADATA
    from megatron_unickpt.held_state.positions import PositionFree
    from megatron_unickpt.measuring.precision import apply_precision
    from megatron_unickpt.measuring.timing import begin as time_collectives
    from megatron_unickpt.witnessing.watch import witness
    from unickpt.api.witness import Witness

__all__ = [
    "METADATA", "RUNTIME", "MegatronCheckpointError", "MegatronSaveError", "PositionFree", "UnickptLoadStrategy",
    "UnickptSaveStrategy", "Witness", "apply_precision", "load", "resume_or_start", "save", "time_collectives", "witness",
]  # fmt: skip

_MODULES = {
    "METADATA": ("megatron_unickpt.held_state.optimizer", "METADATA"),
    "MegatronCheckpointError": ("megatron_unickpt.framework.errors", "MegatronCheckpointError"),
    "MegatronSaveError": ("megatron_unickpt.framework.errors", "MegatronSaveError"),
    "PositionFree": ("megatron_unickpt.held_state.positions", "PositionFree"),
    "RUNTIME": ("megatron_unickpt.edge", "RUNTIME"),
    "apply_precision": ("megatron_unickpt.measuring.precision", "apply_precision"),
    "load": ("megatron_unickpt.api", "load"),
    "resume_or_start": ("megatron_unickpt.api", "resume_or_start"),
    "save": ("megatron_unickpt.api", "save"),
    "time_collectives": ("megatron_unickpt.measuring.timing", "begin"),
    "Witness": ("unickpt.api.witness", "Witness"),
    "witness": ("megatron_unickpt.witnessing.watch", "witness"),
    "UnickptLoadStrategy": ("megatron_unickpt.dist_checkpointing.strategies", "UnickptLoadStrategy"),
    "UnickptSaveStrategy": ("megatron_unickpt.dist_checkpointing.strategies", "UnickptSaveStrategy"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because megatron-core's import is not complete when this package is imported."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _MODULES[name]
    return getattr(import_module(module), attribute)


autoload.watch(autoload.MEGATRON)
