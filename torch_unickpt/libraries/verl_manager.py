"""``FSDPCheckpointManager`` of verl: model and optimizer as a checkpoint of unickpt, all else by verl itself.

verl pickles the DTensors of each rank into a file whose name has the number of ranks
(``verl/utils/checkpoint/fsdp_checkpoint_manager.py``), so that a job of another size does not find its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torch_unickpt.loading.load_training import load_training
from torch_unickpt.saving.save_training import save_training
from unickpt.base.errors import SaveFailedError
from unickpt.base.logs import logger
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.base import is_url

_OURS = ("model", "optimizer")


@contextmanager
def _others_alone(manager: Any, name: str, leave_out: tuple[str, ...]) -> Iterator[None]:
    """Let a manager save or load without some of its contents."""
    before = getattr(manager, name)
    setattr(manager, name, [each for each in before if each not in leave_out])
    try:
        yield
    finally:
        setattr(manager, name, before)


def _is_flat(model: Any) -> bool:
    """Whether FSDP1 has wrapped a model: its parameters are flat."""
    return any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules())


def save(wrapped: Callable[..., Any], manager: Any, given: Mapping[str, Any]) -> Any:
    """Save as ``save_checkpoint`` of a manager does. What unickpt cannot save, verl saves as before, all of it."""
    folder = given["local_path"]
    ours = folder is not None and not is_url(str(folder)) and manager.should_save_model
    if not ours or manager.should_save_lora_only or _is_flat(manager.model):
        return wrapped(**given)
    with _others_alone(manager, "checkpoint_save_contents", _OURS):
        result = wrapped(**given)
    try:
        save_training(
            manager.model, manager.optimizer if manager.should_save_optimizer else None, os.path.abspath(folder),
            step=int(given["global_step"]), scheduler=manager.lr_scheduler, save_latest=False,
        )  # fmt: skip
    except SaveFailedError as err:  # on every rank
        if dist.get_rank() == 0:
            logger.warning("unickpt: %s verl saves this checkpoint in its own format instead.", err)
        return wrapped(**given)
    return result


def load(wrapped: Callable[..., Any], manager: Any, given: Mapping[str, Any]) -> Any:
    """Load as ``load_checkpoint`` of a manager does, under any number of ranks.

    Of the same number of ranks verl restores the generators and the schedule of each; otherwise unickpt does.
    """
    folder = given["local_path"]
    if folder is None or is_url(str(folder)) or not is_checkpoint(str(folder)):
        return wrapped(**given)
    extra = os.path.join(folder, f"extra_state_world_size_{manager.world_size}_rank_{manager.rank}.pt")
    own = manager.should_load_extra and os.path.exists(extra)
    if manager.should_load_model:
        load_training(
            manager.model, manager.optimizer if manager.should_load_optimizer else None, os.path.abspath(folder),
            scheduler=manager.lr_scheduler if manager.should_load_extra and not own else None,
            restore_rng=manager.should_load_extra and not own,
        )  # fmt: skip
    with _others_alone(manager, "checkpoint_load_contents", _OURS if own else (*_OURS, "extra")):
        return wrapped(**given)
