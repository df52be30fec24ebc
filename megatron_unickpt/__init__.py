"""The Megatron adapter: ``--ckpt-format unickpt``, or a strategy for ``dist_checkpointing``.

Importing this package (which ``unickpt.autoload`` does by itself) arms the hooks; each goes in when
its Megatron module is imported. Jobs that do not ask for unickpt run through them unchanged, but can
load unickpt checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unickpt import autoload

if TYPE_CHECKING:
    from megatron_unickpt.api import load, save
    from megatron_unickpt.strategies import UnickptLoadStrategy, UnickptSaveStrategy

__all__ = ["UnickptLoadStrategy", "UnickptSaveStrategy", "load", "save"]

_HOMES = {
    "load": "megatron_unickpt.api", "save": "megatron_unickpt.api",
    "UnickptLoadStrategy": "megatron_unickpt.strategies", "UnickptSaveStrategy": "megatron_unickpt.strategies",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names, imported when they are used: this package is imported while megatron-core still is."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


autoload.watch(autoload.MEGATRON)
