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
    from megatron_unickpt.timing import begin as time_collectives

__all__ = ["UnickptLoadStrategy", "UnickptSaveStrategy", "load", "save", "time_collectives"]

_HOMES = {
    "load": ("megatron_unickpt.api", "load"),
    "save": ("megatron_unickpt.api", "save"),
    "time_collectives": ("megatron_unickpt.timing", "begin"),
    "UnickptLoadStrategy": ("megatron_unickpt.strategies", "UnickptLoadStrategy"),
    "UnickptSaveStrategy": ("megatron_unickpt.strategies", "UnickptSaveStrategy"),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are used: this package is imported while megatron-core still is."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


autoload.watch(autoload.MEGATRON)
