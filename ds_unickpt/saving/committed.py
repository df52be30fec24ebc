"""What follows the commit of a checkpoint in its folder."""

from __future__ import annotations

import fnmatch

from ds_unickpt.saving import hints
from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.storage.base import is_url
from unickpt.checkpoint.storage.open import open_storage

_STATES = "*_states.pt"  # DeepSpeed's names of files of models, optimizers, layers and experts end so


def complete(directory: str) -> None:
    """Complete the folder of a committed checkpoint. Runs on the coordinator. A failure is no error of the save."""
    hints.leave_readme(directory)
    _remove_replaced(directory)


def _remove_replaced(directory: str) -> None:
    """Remove the files of a save by DeepSpeed itself under this tag, as another one of DeepSpeed would replace them.

    DeepSpeed alone reads them without a look at their age: a job without unickpt would resume from an older state.
    """
    if is_url(directory):  # DeepSpeed writes to none
        return
    place = open_storage(directory)
    try:
        names = [name for name in place.names() if fnmatch.fnmatch(name, _STATES)]
        for name in names:
            place.delete(name)
        left = [name for name in names if place.size_bytes(name) is not None]
    except (UnickptError, OSError) as err:
        names, left = [], [str(err)]
    if left:
        logger.warning(
            "unickpt: %s: files of an earlier save of DeepSpeed stay under this tag (%s). Delete them: DeepSpeed alone would "
            "load them.",
            directory,
            left[0],
        )
    elif names:
        logger.info("unickpt: %s: removed %d files of DeepSpeed's earlier save under this tag", directory, len(names))
