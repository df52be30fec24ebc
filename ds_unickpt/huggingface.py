"""What Hugging Face's libraries tell: of a model, and of what Trainer does with a checkpoint directory after it was saved."""

from __future__ import annotations

import os
import sys
from typing import Any

from ds_unickpt import trainer_folders
from unickpt.language.facts import CONFIG_NAMES, Model

_DEPTH = 40  # frames from a save up to Trainer's loop, callbacks of other libraries included


def model_of(module: Any) -> Model:
    """What the configuration of a model of transformers tells; nothing of other modules."""
    config = getattr(module, "config", None)
    return Model.of_config({name: getattr(config, name, None) for name in CONFIG_NAMES})


def called_by_trainer() -> bool:
    """Whether a Trainer made this call: it takes every return of a save for a checkpoint, and completes its folder."""
    return "transformers.trainer" in sys.modules and _trainer() is not None


def touches_checkpoints(save_dir: str) -> str:
    """What a Trainer that made this call does to checkpoints as soon as the save has returned, or ''.

    Trainer deletes older checkpoints as soon as the save has returned (``save_total_limit``,
    ``Trainer._rotate_checkpoints``), which is only safe if this one exists by then; some versions
    save into ``tmp-checkpoint-...`` and rename it.
    """
    if "transformers.trainer" not in sys.modules:
        return ""
    if any(part.startswith("tmp-checkpoint-") for part in os.path.normpath(save_dir).split(os.sep)):
        return "Trainer renames the directory when the save returns"
    trainer = _trainer()
    if trainer is not None and getattr(trainer.args, "save_total_limit", None) is not None:
        return "Trainer deletes older checkpoints when the save returns (save_total_limit)"
    return ""


def deletes_the_last(save_dir: str) -> bool:
    """Whether the Trainer that made this call, if one did, deletes all checkpoints that can be resumed when the save returns.

    Args:
        save_dir: a ``checkpoint-N`` folder whose save has failed.
    """
    trainer = _trainer() if "transformers.trainer" in sys.modules else None
    limit = getattr(getattr(trainer, "args", None), "save_total_limit", None)
    if limit is None:
        return False
    best = getattr(getattr(trainer, "state", None), "best_model_checkpoint", None)
    left = trainer_folders.left_by_rotation(save_dir, int(limit), best)
    before = trainer_folders.beside(save_dir)
    return not any(map(trainer_folders.is_usable, left)) and any(map(trainer_folders.is_usable, before))


def _trainer() -> Any:
    """The Trainer that called us, if one did."""
    kind = sys.modules["transformers.trainer"].Trainer
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
