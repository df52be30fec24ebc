"""The memory tier of Megatron's training scripts: which of their saves go into memory, and what a load finds there.

If the scripts save non-persistent checkpoints, those go into memory and the persistent ones to disk. Otherwise all saves but
each n-th go into memory (``--unickpt-memory-to-disk-every``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_unickpt.framework.flags import options_of
from megatron_unickpt.pretraining import non_persistent
from megatron_unickpt.pretraining.arguments import IN_MEMORY, save_options
from megatron_unickpt.runtime import Runtime
from unickpt.base.errors import CoordinationError, UnickptError
from unickpt.base.logs import logger
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.checkpoint_folder import tracked_iteration
from unickpt.checkpoint.memory.offers import MemoryResume
from unickpt.checkpoint.memory.tier import MemoryTier, MemoryTurn
from unickpt.checkpoint.storage.base import absolute


def memory_options(arguments: Any) -> MemoryOptions:
    """Return the options of the memory tier. ``--non-persistent-ckpt-type in_memory`` enables it."""
    found = options_of(arguments).memory
    return replace(found, to_disk_every=found.to_disk_every or 1) if getattr(arguments, IN_MEMORY, False) else found


def tier_of(runtime: Runtime, arguments: Any) -> MemoryTier:
    """Return the memory tier of the job."""
    return runtime.memory(memory_options(arguments), save_options(arguments))


def folder_of(arguments: Any, folder: str) -> str:
    """Return the folder in which the checkpoints in memory would be on disk: the one of non-persistent ones, if there are any.

    Args:
        arguments: the scripts' arguments.
        folder: ``--save`` or ``--load``.
    """
    return (non_persistent.folder_of(arguments, folder) if _divided(arguments) else None) or folder


def _divided(arguments: Any) -> bool:
    """Return whether the scripts save non-persistent checkpoints between the persistent ones."""
    kind = non_persistent.kind_of(arguments)
    return kind == non_persistent.GLOBAL and bool(getattr(arguments, "non_persistent_save_interval", None))


def turn_of(runtime: Runtime, arguments: Any, call: Mapping[str, Any]) -> MemoryTurn | None:
    """Decide whether a checkpoint goes into memory. All ranks call it.

    Args:
        runtime: state of the adapter.
        arguments: the scripts' arguments.
        call: keyword arguments of the ``save_checkpoint`` call.

    Returns:
        None if the checkpoint goes to disk.
    """
    tier, divided = tier_of(runtime, arguments), _divided(arguments)
    if not tier.enabled or call.get("release") or divided != bool(call.get("non_persistent_ckpt")):
        return None
    try:
        return tier.turn(folder_of(arguments, str(arguments.save)), runtime.exchange(), always=divided)
    except CoordinationError as err:
        logger.error("unickpt: the next checkpoint goes to disk, not into memory: %s", err)
        return None


def resume_of(runtime: Runtime, arguments: Any, load_dir: str, step: int | None) -> MemoryResume:
    """Find what a load of the scripts may take from memory. All ranks call it.

    Args:
        runtime: state of the adapter.
        arguments: the scripts' arguments.
        load_dir: the folder from which they load.
        step: ``--ckpt-step``.
    """
    save_dir = getattr(arguments, "save", None)
    continues = bool(save_dir) and absolute(str(save_dir)) == absolute(load_dir)
    place = folder_of(arguments, load_dir)
    beside = (os.path.join(load_dir, non_persistent.SUBDIRECTORY),)
    return MemoryResume(tier_of(runtime, arguments), place, runtime.exchange(), step=step, continues=continues, beside=beside)


def tracked(load_dir: str) -> int:
    """Return the iteration that Megatron's tracker file names; -1 without one."""
    with contextlib.suppress(UnickptError, OSError):
        found = tracked_iteration(load_dir)
        return -1 if found is None else found
    return -1
