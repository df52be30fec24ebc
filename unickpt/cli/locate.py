"""From what the user typed to a checkpoint: its own directory, a save directory, or the output directory of a Trainer run.

Directories are paths or URLs. Manifests and indexes are read, data files are not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from unickpt.commit import DATA_FOLDER, ROWS_FOLDER
from unickpt.errors import NotACheckpointError, StorageError, UnickptError
from unickpt.loading import Checkpoint, is_checkpoint, read_manifest
from unickpt.resuming import latest_tag, whole
from unickpt.storage import Storage, is_url, open_storage

_TRAINER_FOLDER = re.compile(r"checkpoint-\d+")  # transformers: PREFIX_CHECKPOINT_DIR and the step
_TRAINER_STATE, _TRAINER_ARGUMENTS = "trainer_state.json", "training_args.bin"
_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class Location:
    """What a directory, or a URL, is.

    Attributes:
        checkpoint: the checkpoint that is meant, or None for a directory of several without ``latest``.
        save_directory: the directory as one that holds checkpoints, or None if it is a checkpoint itself.
    """

    checkpoint: str | None
    save_directory: str | None


@dataclass(frozen=True, slots=True)
class Tag:
    """One checkpoint of a directory.

    Attributes:
        tag: name of its directory. For a Trainer run two names, as ``checkpoint-500/global_step500``.
        step: None if the manifest cannot be read.
        whole: manifest and index are sound, and every file exists and has its size.
        problem: why it is not whole; empty if it is.
    """

    tag: str
    step: int | None
    whole: bool
    problem: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest whole checkpoint of a directory.

    Attributes:
        path: what a job resumes from. In a Trainer run ``checkpoint-500``, otherwise the checkpoint.
        checkpoint: directory of the checkpoint.
        step: training step.
    """

    path: str
    checkpoint: str
    step: int


def locate(directory: str) -> Location:
    """Find out what the directory is.

    Raises:
        NotACheckpointError: it is neither a checkpoint nor a directory that holds some. The message says what it is.
        UnsafePathError, FormatError: ``latest`` names something outside the directory.
        StorageError: the directory cannot be read.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        return Location(place.where(), None)
    latest = latest_tag(directory)
    if latest is not None and (is_checkpoint(place.where(latest)) or not _foreign(directory)):
        return Location(place.where(latest), place.where())
    inside = [name for name in place.folders() if is_checkpoint(place.where(name))]
    if len(inside) == 1 and place.size_bytes(_TRAINER_STATE) is not None:  # checkpoint-500, which never holds two
        return Location(place.where(inside[0]), place.where())
    if inside or _runs(place):
        return Location(None, place.where())
    raise NotACheckpointError(f"{place}: {_what_it_is(place, directory)}")


def locate_checkpoint(directory: str) -> str:
    """The one checkpoint that is meant.

    Raises:
        NotACheckpointError: also if there are several without ``latest``. Otherwise as ``locate``.
    """
    location = locate(directory)
    if location.checkpoint is None:
        found = [tag.tag for tag in list_tags(directory) if tag.whole]
        names = ", ".join(found[-_SHOWN:]) if found else "none is whole"
        raise NotACheckpointError(f"{directory}: has no 'latest' file; name one of the checkpoints there: {names}")
    return location.checkpoint


def list_tags(directory: str) -> list[Tag]:
    """Every finished or unfinished checkpoint of a directory, also those in ``checkpoint-*`` of a Trainer run, by step."""
    place = open_storage(directory)
    inside = [(name, place.inside(name)) for name in place.folders()]
    tags = [_tag(name, storage) for name, storage in inside if is_checkpoint(storage.where()) or _is_unfinished(storage)]
    runs = list(_runs(place))
    trainer = any(place.inside(name).size_bytes(_TRAINER_STATE) is not None for name in runs)
    for name in runs:
        folder = place.inside(name)
        torn = (
            f"{_TRAINER_STATE} is missing or damaged: Trainer cannot resume from it"
            if _is_torn(folder, trainer=trainer)
            else ""
        )
        found = list_tags(folder.where()) or [Tag("", None, False, "it holds no checkpoint of unickpt")]
        tags += [Tag(f"{name}/{tag.tag}".rstrip("/"), tag.step, tag.whole and not torn, tag.problem or torn) for tag in found]
    return sorted(tags, key=lambda tag: (-1 if tag.step is None else tag.step, tag.tag))


def newest(directory: str) -> Newest | None:
    """The newest whole checkpoint of a directory, or of a Trainer run's output directory; or the directory itself.

    Only manifests are read until a whole one is found, so the cost does not grow with old checkpoints.

    Returns:
        None if the directory holds no checkpoint, or none that is whole.

    Raises:
        StorageError: the storage does not answer.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        if not _is_whole(directory):
            return None
        return Newest(place.where(), place.where(), read_manifest(place).step)
    runs = list(_runs(place))
    trainer = any(place.inside(name).size_bytes(_TRAINER_STATE) is not None for name in runs)
    found = [(step, name, name) for step, name in whole(directory)]
    for name in runs:
        if not _is_torn(place.inside(name), trainer=trainer):
            found += [(step, name, f"{name}/{inner}") for step, inner in whole(place.where(name))]
    for step, path, checkpoint in sorted(found, reverse=True):
        if _is_whole(place.where(checkpoint)):
            return Newest(place.where(path), place.where(checkpoint), step)
    return None


def foreign_beside(directory: str) -> dict[str, str]:
    """Checkpoints directly in a directory that other programs wrote: the kind of each by its name. Empty for a URL.

    DeepSpeed's own are there if unickpt could not describe a job's state and DeepSpeed saved it instead.
    """
    from unickpt.foreign.detect import TRANSFORMERS, kind_of

    if is_url(directory):
        return {}
    kinds = {name: kind_of(Path(directory, name)) for name in open_storage(directory).folders()}
    return {name: kind for name, kind in kinds.items() if kind not in ("", TRANSFORMERS.name)}


def _runs(place: Storage) -> list[str]:
    """Names of the folders that Trainer, or a script like it, writes: ``checkpoint-500``, a save directory itself.

    Empty if none of them holds a checkpoint of unickpt, finished or not.
    """
    names = [
        name for name in place.folders() if _TRAINER_FOLDER.fullmatch(name) and not is_checkpoint(place.where(name))
    ]  # fmt: skip
    return names if any(_holds_ours(place.inside(name)) for name in names) else []


def _holds_ours(place: Storage) -> bool:
    inside = [place.inside(name) for name in place.folders()]
    return any(is_checkpoint(each.where()) or _is_unfinished(each) for each in inside)


def _is_torn(folder: Storage, *, trainer: bool) -> bool:
    """Whether Trainer was stopped before its own state was whole. Other programs do not write that file at all."""
    size = folder.size_bytes(_TRAINER_STATE)
    if size is None:
        return trainer or folder.size_bytes(_TRAINER_ARGUMENTS) is not None
    try:
        return not isinstance(json.loads(folder.read(_TRAINER_STATE, 0, size)), dict)
    except (ValueError, RecursionError):
        return True


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


def _is_whole(checkpoint: str) -> bool:
    """Whether it can be opened. A storage that does not answer is no reason to name an older one: raises StorageError."""
    try:
        Checkpoint.open(checkpoint)
    except StorageError:
        raise
    except UnickptError:
        return False
    return True


def _foreign(directory: str) -> str:
    """The kind of another program's checkpoint there; '' if there is none, or if it is in an object store."""
    from unickpt.foreign.detect import kind_of  # all readers of other formats: not for every look at a checkpoint of ours

    return "" if is_url(directory) else kind_of(Path(directory))


def is_file(directory: str) -> bool:
    """Whether a path names a file; never so for a URL."""
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
    if _is_unfinished(place):
        return "no manifest.json: the save of this checkpoint did not finish; use an earlier one"
    return "neither a checkpoint (it has no manifest.json) nor a directory of checkpoints (no 'latest', none inside)"
