"""Trainer of transformers without DeepSpeed: states of a unickpt checkpoint that a folder ``checkpoint-N`` holds.

Such a folder comes from a run under DeepSpeed. Trainer itself reads weights and the number of steps there, and without a file
``optimizer.pt`` it starts optimizer and schedule anew, without a message (``_load_optimizer_and_scheduler`` of trainer.py).
"""

from __future__ import annotations

import os
from typing import Any

from torch_unickpt.loading.load_training import load_training
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.checkpoint_folder import latest_tag, read_manifest
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.open import open_storage


def checkpoint_in(folder: str) -> str:
    """Return the unickpt checkpoint of a folder of Trainer; '' if there is none, or if Trainer's own states are there."""
    try:
        names = os.listdir(folder)
        tag = latest_tag(folder)
    except (OSError, UnickptError):
        return ""
    found = "" if tag is None else os.path.join(folder, tag)
    own = any(name.startswith(("optimizer", "pytorch_model_fsdp")) for name in names)
    return found if found and not own and is_checkpoint(found) else ""


def load(trainer: Any, checkpoint: str) -> None:
    """Load weights, masters, states of the optimizer, and the position in the schedule. Every rank calls this.

    Frozen weights that the checkpoint leaves out, as those under adapters of PEFT, stay as the program has made them.

    Raises:
        UnickptError: the checkpoint does not fit. Raised on every rank.
    """
    whole = not read_manifest(open_storage(checkpoint)).excluded
    load_training(
        trainer.model_wrapped, trainer.optimizer, os.path.abspath(checkpoint), scheduler=trainer.lr_scheduler, strict=whole,
        restore_rng=False,
    )  # fmt: skip
