"""The training loop that called a save, and what it does to checkpoints as soon as the call has returned.

Trainer of transformers and Lightning ignore what ``save_checkpoint`` returns: they delete older checkpoints next, also if
there is no new one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ds_unickpt import trainer_folders

_DEPTH = 40  # frames from a save up to the loop, callbacks of other libraries included
_LIGHTNING = ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed")


def called_by_trainer() -> bool:
    """Whether a Trainer made this call: it takes every return of a save for a checkpoint, and completes its folder."""
    return _trainer() is not None


def touches_checkpoints(save_dir: str) -> str:
    """What the caller does to checkpoints as soon as the save has returned, or ''.

    That is only safe if this checkpoint exists by then. Some versions of Trainer rename ``tmp-checkpoint-...``.
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
    """Who deletes the last checkpoint that can be resumed when this call returns, and by which setting; '' if no one does.

    Args:
        save_dir: a folder whose save has failed.
    """
    if _lightning_deletes():  # which of its checkpoints are whole it does not tell, so it counts as if this were the last
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
    """The Trainer that called us, if one did."""
    module = sys.modules.get("transformers.trainer")
    return None if module is None else _calling(module.Trainer)


def _lightning_deletes() -> bool:
    """Whether Lightning called us, and keeps no more than some of its checkpoints."""
    for name in _LIGHTNING:
        module = sys.modules.get(name)
        strategy = None if module is None else _calling(module.DeepSpeedStrategy)
        if strategy is not None:
            trainer = getattr(getattr(strategy, "lightning_module", None), "_trainer", None)
            callbacks = getattr(trainer, "checkpoint_callbacks", ())
            return any(getattr(one, "save_top_k", -1) > 0 or bool(getattr(one, "save_last", False)) for one in callbacks)
    return False


def _calling(kind: type[Any]) -> Any:
    """The nearest object of a class, one of whose methods is on the stack; None if there is none."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
