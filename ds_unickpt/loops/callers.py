"""Finds the training loop that called a save, and what it does to older checkpoints after the call returns.

transformers' Trainer and Lightning ignore the result of ``save_checkpoint``. They delete older checkpoints after it, even if
the save failed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ds_unickpt.loops import trainer_folders

_DEPTH = 40  # stack frames to search, from a save up to the loop. Callbacks of other libraries lie between them.
_LIGHTNING = ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed")


def called_by_trainer() -> bool:
    """Whether Trainer made this call. It takes every save that returns for a success, and completes the folder."""
    return _trainer() is not None


def completes_folder() -> str:
    """Return the caller that gives each checkpoint a folder of its own and writes further files there; '' if none does.

    Such a checkpoint cannot be in memory alone: the folder on disk would look complete without it.
    """
    own = "gives each checkpoint a folder of its own and writes further files there"
    if _trainer() is not None:
        return f"Trainer {own}"
    if _lightning() is not None:
        return f"Lightning {own}"
    module = sys.modules.get("accelerate.accelerator")
    return "" if module is None or _calling(module.Accelerator) is None else f"Accelerate {own}"


def touches_checkpoints(save_dir: str) -> str:
    """Return what the caller does to checkpoints when the save returns, or ''.

    This is safe only if the new checkpoint is complete by then. Some versions of Trainer rename ``tmp-checkpoint-...``.
    """
    if any(part.startswith("tmp-checkpoint-") for part in os.path.normpath(save_dir).split(os.sep)):
        return "Trainer renames the directory when the save returns"
    trainer = _trainer()
    if trainer is not None and getattr(trainer.args, "save_total_limit", None) is not None:
        return "Trainer deletes older checkpoints when the save returns (save_total_limit)"
    if _lightning_deletes():
        return "Lightning's ModelCheckpoint deletes older checkpoints when the save returns (save_top_k, save_last)"
    return ""


def deletes_the_last(save_dir: str) -> str:
    """Return the loop that deletes the last usable checkpoint when this call returns, with the setting; '' if none does.

    ``save_dir``: folder of a save that failed.
    """
    if _lightning_deletes():  # which of its checkpoints are complete is unknown, so assume that it deletes the last one
        return "Lightning's ModelCheckpoint (save_top_k, save_last)"
    trainer = _trainer()
    limit = getattr(getattr(trainer, "args", None), "save_total_limit", None)
    if limit is None:
        return ""
    best = getattr(getattr(trainer, "state", None), "best_model_checkpoint", None)
    left = trainer_folders.left_by_rotation(save_dir, int(limit), best)
    before = trainer_folders.beside(save_dir)
    lost = not any(map(trainer_folders.is_usable, left)) and any(map(trainer_folders.is_usable, before))
    return "Trainer (save_total_limit)" if lost else ""


def _trainer() -> Any:
    """Return the Trainer that called this function, or None."""
    module = sys.modules.get("transformers.trainer")
    return None if module is None else _calling(module.Trainer)


def _lightning_deletes() -> bool:
    """Whether Lightning called this function and deletes some of its checkpoints."""
    trainer = getattr(getattr(_lightning(), "lightning_module", None), "_trainer", None)
    callbacks = getattr(trainer, "checkpoint_callbacks", ())
    return any(getattr(one, "save_top_k", -1) > 0 or bool(getattr(one, "save_last", False)) for one in callbacks)


def _lightning() -> Any:
    """Return the strategy of Lightning that called this function, or None."""
    for name in _LIGHTNING:
        module = sys.modules.get(name)
        strategy = None if module is None else _calling(module.DeepSpeedStrategy)
        if strategy is not None:
            return strategy
    return None


def _calling(kind: type[Any]) -> Any:
    """Return the nearest ``self`` of a class on the call stack, or None."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
