"""Hooks on what Megatron's scripts do with the tracker file and with old checkpoints during a save (``tracker``)."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_unickpt import tracker
from megatron_unickpt.dist_checkpointing import saving
from megatron_unickpt.pretraining import non_persistent
from megatron_unickpt.runtime import Runtime, ScriptCall
from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import RELEASE, iteration_name
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.save.upload import tags_of
from unickpt.checkpoint.storage.base import absolute, join, split
from unickpt.checkpoint.storage.open import open_storage


def name_native(runtime: Runtime, options: argparse.Namespace, given: Mapping[str, Any], call: ScriptCall) -> None:
    """Let the tracker file name a checkpoint that Megatron has saved in its own format. Called on rank 0.

    Args:
        runtime: state of the adapter.
        options: the scripts' arguments.
        given: arguments of the ``save_checkpoint`` call.
        call: the save.
    """
    name = RELEASE if given.get("release") else iteration_name(int(given["iteration"]))
    directory = absolute(join(non_persistent.save_folder(options, given), name))
    try:
        open_storage(directory).delete(MANIFEST_FILE)  # left by an earlier save of unickpt of this iteration
        runtime.trackers.name(directory, call.order, replaces=call.replaces, native=True)
    except (OSError, UnickptError) as err:
        logger.warning("unickpt: %s is saved, but the tracker file does not name it: %s", directory, err)
    else:
        saving.remove_old(runtime, directory)


def tracker_file(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_checkpoint_tracker_filename``: Megatron's function writes its number into nothing (``tracker``).

    It does not find a tracker file that names a checkpoint which is not there.
    """
    call, name = runtime.call, wrapped(*args, **kwargs)
    if call.hidden and absolute(os.path.dirname(name)) == call.hidden:
        return f"{name} (names no checkpoint)"
    if call.diverted is not None and torch.distributed.get_rank() == 0 and call.diverted.take():
        return os.devnull
    return name


def remove_old_non_persistent(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``cleanup_old_non_persistent_checkpoint``: a checkpoint that is still being written does not count."""
    call = runtime.call
    if call.diverted is None and call.memory is None:
        return wrapped(*args, **kwargs)
    if torch.distributed.get_rank() == 0:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
        bound.apply_defaults()
        folder, saver = absolute(str(bound.arguments["save_dir"])), runtime.saver()
        busy = {split(save.directory)[1] for save in saver.pending} | tags_of(saver.uploads, folder)
        tracker.remove_old_non_persistent(folder, int(bound.arguments["leave_ckpt_num"]), busy=busy)
    return None
