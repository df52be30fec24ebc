"""Files of a framework's own checkpoint in the folder of a checkpoint that has taken its place.

The framework alone reads them without a look at their age: a job without unickpt would resume from an older state.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.storage.base import is_url
from unickpt.checkpoint.storage.open import open_storage


def remove_replaced(directory: str, framework: str, files: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Remove files from the folder of a committed checkpoint, as the framework's own save would replace them.

    A failure is a warning: the checkpoint is complete. Object stores are left alone: frameworks do not write into them.

    Args:
        directory: path or URL of the checkpoint.
        framework: for messages.
        files, folders: patterns of names directly in the folder. Of folders, the files directly in them are removed.
    """
    if is_url(directory):
        return
    place = open_storage(directory)
    try:
        found = [name for name in place.names() if any(fnmatch(name, each) for each in files)]
        inside = [name for name in place.folders() if any(fnmatch(name, each) for each in folders)]
        for name in found:
            place.delete(name)
        for name in inside:
            place.delete_folder(name)
        left = [*(name for name in found if place.size_bytes(name) is not None), *set(inside).intersection(place.folders())]
    except (UnickptError, OSError) as err:
        found, inside, left = [], [], [str(err)]
    if left:
        logger.warning(
            "unickpt: %s: files of an earlier save of %s stay in this folder (%s). Delete them: %s alone would load them.",
            directory, framework, left[0], framework,
        )  # fmt: skip
    elif found or inside:
        logger.info("unickpt: %s: removed the files of an earlier save of %s: %s", directory, framework, [*found, *inside][0])
