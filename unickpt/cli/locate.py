"""From what the user typed to a checkpoint: its own directory, or a save directory with ``latest``; paths or URLs."""

from __future__ import annotations

from dataclasses import dataclass

from unickpt.commit import DATA_FOLDER, ROWS_FOLDER
from unickpt.errors import NotACheckpointError, UnickptError
from unickpt.loading import Checkpoint, is_checkpoint, read_manifest
from unickpt.resuming import latest_tag
from unickpt.storage import Storage, open_storage


@dataclass(frozen=True, slots=True)
class Location:
    """What a directory, or a URL, is.

    Attributes:
        checkpoint: the checkpoint meant, or None for a save directory without ``latest``.
        save_directory: the directory as a save directory, or None if it is a checkpoint itself.
    """

    checkpoint: str | None
    save_directory: str | None


@dataclass(frozen=True, slots=True)
class Tag:
    """One checkpoint of a save directory.

    Attributes:
        tag: the directory's name.
        step: None where the manifest cannot be read.
        whole: manifest and index are sound, every file is there and has its size.
        problem: why it is not whole; empty if it is.
    """

    tag: str
    step: int | None
    whole: bool
    problem: str


def locate(directory: str) -> Location:
    """What the directory is.

    Raises:
        NotACheckpointError: neither a checkpoint nor a directory of checkpoints.
        UnsafePathError, FormatError: ``latest`` names something outside the directory.
        StorageError: the directory cannot be read.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        return Location(place.where(), None)
    latest = latest_tag(directory)
    if latest is not None:
        return Location(place.where(latest), place.where())
    folders = place.folders()
    if any(is_checkpoint(place.where(name)) for name in folders):
        return Location(None, place.where())
    if not folders and not place.names():
        raise NotACheckpointError(f"{place}: there is no such directory, or nothing in it")
    raise NotACheckpointError(
        f"{place}: neither a checkpoint (no manifest.json: the save did not finish, or unickpt did not write it) "
        "nor a directory of checkpoints (no 'latest')"
    )


def locate_checkpoint(directory: str) -> str:
    """The one checkpoint that is meant. Raises as ``locate``, and NotACheckpointError where none is singled out."""
    location = locate(directory)
    if location.checkpoint is None:
        found = ", ".join(tag.tag for tag in list_tags(directory) if tag.whole) or "none is whole"
        raise NotACheckpointError(f"{directory}: has no 'latest' file; name one of the checkpoints there: {found}")
    return location.checkpoint


def list_tags(save_directory: str) -> list[Tag]:
    """Every finished or unfinished checkpoint of a save directory, by step; data files are not read."""
    place = open_storage(save_directory)
    inside = [(name, place.inside(name)) for name in place.folders()]
    tags = [_tag(name, storage) for name, storage in inside if is_checkpoint(storage.where()) or _is_unfinished(storage)]
    return sorted(tags, key=lambda tag: (-1 if tag.step is None else tag.step, tag.tag))


def _is_unfinished(storage: Storage) -> bool:
    return not {DATA_FOLDER, ROWS_FOLDER}.isdisjoint(storage.folders())


def _tag(name: str, storage: Storage) -> Tag:
    step = None
    try:
        step = read_manifest(storage).step
        Checkpoint.open(storage.where())
    except NotACheckpointError:
        return Tag(name, None, False, "the save did not finish")
    except UnickptError as err:
        return Tag(name, step, False, str(err))
    return Tag(name, step, True, "")
