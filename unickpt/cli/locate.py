"""From what the user typed to a checkpoint: a checkpoint's own directory, or a save directory with ``latest``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unickpt.commit import DATA_FOLDER, ROWS_FOLDER
from unickpt.errors import NotACheckpointError, StorageError, UnickptError
from unickpt.loading import Checkpoint, is_checkpoint, read_manifest
from unickpt.resuming import latest_tag
from unickpt.storage import PosixStorage


@dataclass(frozen=True, slots=True)
class Location:
    """What a directory is.

    Attributes:
        checkpoint: the checkpoint meant, or None for a save directory without ``latest``.
        save_directory: the directory as a save directory, or None if it is a checkpoint itself.
    """

    checkpoint: Path | None
    save_directory: Path | None


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


def locate(directory: Path) -> Location:
    """What the directory is.

    Raises:
        NotACheckpointError: neither a checkpoint nor a directory of checkpoints.
        UnsafePathError, FormatError: ``latest`` names something outside the directory.
        StorageError: the directory cannot be read.
    """
    with _named_errors(directory):
        if is_checkpoint(directory):
            return Location(directory, None)
        if not directory.is_dir():
            raise NotACheckpointError(f"{directory}: there is no such directory")
        latest = latest_tag(directory)
        if latest is not None:
            return Location(directory / latest, directory)
        if any(is_checkpoint(path) for path in directory.iterdir()):
            return Location(None, directory)
    raise NotACheckpointError(
        f"{directory}: neither a checkpoint (no manifest.json: the save did not finish, or unickpt did not write it) "
        "nor a directory of checkpoints (no 'latest')"
    )


def locate_checkpoint(directory: Path) -> Path:
    """The one checkpoint that is meant. Raises as ``locate``, and NotACheckpointError where none is singled out."""
    location = locate(directory)
    if location.checkpoint is None:
        found = ", ".join(tag.tag for tag in list_tags(directory) if tag.whole) or "none is whole"
        raise NotACheckpointError(f"{directory}: has no 'latest' file; name one of the checkpoints there: {found}")
    return location.checkpoint


def list_tags(save_directory: Path) -> list[Tag]:
    """Every finished or unfinished checkpoint of a save directory, by step; data files are not read."""
    with _named_errors(save_directory):
        tags = [_tag(path) for path in save_directory.iterdir() if is_checkpoint(path) or _is_unfinished(path)]
    return sorted(tags, key=lambda tag: (-1 if tag.step is None else tag.step, tag.tag))


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise StorageError(f"{path}: cannot be read ({err.strerror or err})") from err


def _is_unfinished(path: Path) -> bool:
    return (path / DATA_FOLDER).is_dir() or (path / ROWS_FOLDER).is_dir()


def _tag(path: Path) -> Tag:
    step = None
    try:
        step = read_manifest(PosixStorage(path)).step
        Checkpoint.open(path)
    except NotACheckpointError:
        return Tag(path.name, None, False, "the save did not finish")
    except UnickptError as err:
        return Tag(path.name, step, False, str(err))
    return Tag(path.name, step, True, "")
