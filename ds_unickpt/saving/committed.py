"""What follows the commit of a checkpoint in its folder."""

from __future__ import annotations

from ds_unickpt.saving import hints
from unickpt.checkpoint.save.replaced import remove_replaced

_STATES = ("*_states.pt",)  # DeepSpeed's names of files of models, optimizers, layers and experts end so


def complete(directory: str) -> None:
    """Complete the folder of a committed checkpoint. Runs on the coordinator. A failure is no error of the save."""
    hints.leave_readme(directory)
    remove_replaced(directory, "DeepSpeed", _STATES)
