"""Find the checkpoint that a command-line argument means.

The argument is a path or a URL of a checkpoint, a save directory, or the output directory of a Trainer run. Manifests and
indexes are read, data files are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unickpt.checkpoint_folder import iteration_name, latest_tag, tracked_iteration
from unickpt.errors import NotACheckpointError
from unickpt.load.folders import TRAINER_STATE, is_unfinished, list_tags, trainer_folders
from unickpt.load.validation import is_checkpoint
from unickpt.storage.base import Storage, is_url
from unickpt.storage.open import open_storage

_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class Location:
    """Meaning of a directory or URL.

    Attributes:
        checkpoint: the checkpoint, or None for a save directory without ``latest`` and without Megatron's tracker file.
        save_directory: the save directory, or None if the directory is itself a checkpoint.
    """

    checkpoint: str | None
    save_directory: str | None


def locate(directory: str) -> Location:
    """Classify a directory.

    Raises:
        NotACheckpointError: the directory is neither a checkpoint nor a save directory. The message says what it is.
        UnsafePathError, FormatError: ``latest`` names something outside the directory, or the tracker file is damaged.
        StorageError: the directory cannot be read.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        return Location(place.where(), None)
    latest = latest_tag(directory)
    if latest is not None and (is_checkpoint(place.where(latest)) or not _foreign(directory)):
        return Location(place.where(latest), place.where())
    iteration = tracked_iteration(directory)
    if iteration is not None and is_checkpoint(place.where(iteration_name(iteration))):
        return Location(place.where(iteration_name(iteration)), place.where())
    inside = [name for name in place.folders() if is_checkpoint(place.where(name))]
    if len(inside) == 1 and place.size_bytes(TRAINER_STATE) is not None:  # checkpoint-500, which never holds two
        return Location(place.where(inside[0]), place.where())
    if inside or trainer_folders(place):
        return Location(None, place.where())
    raise NotACheckpointError(f"{place}: {_what_it_is(place, directory)}")


def locate_checkpoint(directory: str) -> str:
    """Return the checkpoint of a directory.

    Raises:
        NotACheckpointError: as for ``locate``, and if a save directory has no ``latest``.
        UnsafePathError, FormatError, StorageError: as for ``locate``.
    """
    location = locate(directory)
    if location.checkpoint is None:
        found = [tag.tag for tag in list_tags(directory) if tag.complete]
        names = ", ".join(found[-_SHOWN:]) if found else "none is complete"
        raise NotACheckpointError(
            f"{directory}: no file names the latest checkpoint; name one of the checkpoints there: {names}"
        )
    return location.checkpoint


def foreign_beside(directory: str) -> dict[str, str]:
    """Return the kind of each checkpoint of another program in a directory, by name. Empty for a URL.

    DeepSpeed writes its own checkpoint where unickpt cannot describe the state of a job.
    """
    from unickpt.convert.detect import TRANSFORMERS, kind_of

    if is_url(directory):
        return {}
    kinds = {name: kind_of(Path(directory, name)) for name in open_storage(directory).folders()}
    return {name: kind for name, kind in kinds.items() if kind not in ("", TRANSFORMERS.name)}


def _foreign(directory: str) -> str:
    """Return the kind of another program's checkpoint; '' if there is none, or for a URL."""
    from unickpt.convert.detect import kind_of  # imports the readers of all formats, which most commands do not need

    return "" if is_url(directory) else kind_of(Path(directory))


def is_file(directory: str) -> bool:
    """Whether a path names a file. False for a URL."""
    return not is_url(directory) and Path(directory).is_file()


def _what_it_is(place: Storage, directory: str) -> str:
    kind = _foreign(directory)
    if kind:
        return f"is a checkpoint of {kind}, not of unickpt; 'unickpt convert {directory} DIR' makes one of it"
    if is_file(directory):
        return "is a file; name the directory of a checkpoint"
    if not place.folders() and not place.names():
        there = not is_url(directory) and Path(directory).is_dir()
        return "the directory is empty" if there else "there is no such directory" + (", or nothing in it" * is_url(directory))
    if is_unfinished(place):
        return "no manifest.json: the save or the conversion that wrote it did not finish; use an earlier one, or convert again"
    return "neither a checkpoint (it has no manifest.json) nor a directory of checkpoints (no 'latest', none inside)"
