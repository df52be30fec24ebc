"""The checkpoints in a save directory, or in the ``checkpoint-N`` folders of a Hugging Face Trainer run.

Reads manifests and indexes, never data files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unickpt.base.errors import NotACheckpointError, StorageError, UnickptError
from unickpt.checkpoint.checkpoint_folder import manifests_in, read_manifest
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.format.layout import DATA_FOLDER, ROWS_FOLDER
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.format.witnessed import passed_until, suspicion
from unickpt.checkpoint.load.validation import checked_index, is_checkpoint
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.open import open_storage
from unickpt.checkpoint.witness_faults import read_faults

TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")  # transformers/trainer_utils.py: PREFIX_CHECKPOINT_DIR and the step
TRAINER_STATE = "trainer_state.json"  # transformers: TRAINER_STATE_NAME. Trainer writes it last
_TRAINER_ARGUMENTS = "training_args.bin"


@dataclass(frozen=True, slots=True)
class TagSummary:
    """One checkpoint of a directory.

    Attributes:
        tag: name of its directory. In a Trainer run two names, such as ``checkpoint-500/global_step500``.
        step: training step. None if the manifest cannot be read.
        complete: manifest and index are valid, and every file exists with its expected size.
        problem: why the checkpoint is not complete. Empty if it is.
    """

    tag: str
    step: int | None
    complete: bool
    problem: str


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest complete checkpoint of a directory.

    Attributes:
        path: path to resume from. In a Trainer run the ``checkpoint-N`` folder, otherwise the checkpoint.
        checkpoint: directory of the checkpoint.
        step: training step.
    """

    path: str
    checkpoint: str
    step: int


def list_tags(directory: str) -> list[TagSummary]:
    """Return every finished or unfinished checkpoint of a directory, and of its ``checkpoint-N`` folders, by step.

    Raises:
        StorageError: the directory cannot be listed.
    """
    place = open_storage(directory)
    inside = [(name, place.subfolder(name)) for name in place.folders()]
    tags = [_tag(name, storage) for name, storage in inside if is_checkpoint(storage.where()) or is_unfinished(storage)]
    runs = trainer_folders(place)
    trainer = _has_trainer_state(place, runs)
    for name in runs:
        folder = place.subfolder(name)
        torn = _torn(folder, trainer=trainer)
        found = list_tags(folder.where()) or [TagSummary("", None, False, "no unickpt checkpoint")]
        for tag in found:
            path = f"{name}/{tag.tag}".rstrip("/")
            tags.append(TagSummary(path, tag.step, tag.complete and not torn, tag.problem or torn))
    return sorted(tags, key=lambda tag: (-1 if tag.step is None else tag.step, tag.tag))


def newest(directory: str, *, witnessed: bool = False) -> NewestCheckpoint | None:
    """Return the newest complete checkpoint of a directory or of a Trainer run, or the directory itself if it is a checkpoint.

    Reads manifests, and checks the files of the newest until one is complete.

    Args:
        directory: a path or a URL.
        witnessed: of the checkpoints that are not newer than the last step that the witness of their model has passed.

    Returns:
        None if the directory holds no such checkpoint.

    Checkpoints that may have traces of a fault that the witness has found do not count.

    Raises:
        StorageError: the storage cannot be read.
        FormatError: the file that names these faults is damaged.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        found = _complete(place)
        if found is None or (witnessed and not _is_witnessed(found, [found])):
            return None
        return NewestCheckpoint(place.where(), place.where(), found.step)
    runs = trainer_folders(place)
    trainer = _has_trainer_state(place, runs)
    candidates = [(manifest.step, name, name, manifest) for name, manifest in _sound_in(directory)]
    for name in runs:
        if not _torn(place.subfolder(name), trainer=trainer):
            inside = _sound_in(place.where(name))
            candidates += [(manifest.step, name, f"{name}/{inner}", manifest) for inner, manifest in inside]
    known = [manifest for *_, manifest in candidates]
    for step, path, checkpoint, manifest in sorted(candidates, key=lambda each: each[:3], reverse=True):
        if witnessed and not _is_witnessed(manifest, known):
            continue
        if _complete(open_storage(place.where(checkpoint))) is not None:
            return NewestCheckpoint(place.where(path), place.where(checkpoint), step)
    return None


def _sound_in(directory: str) -> list[tuple[str, Manifest]]:
    """Return names and manifests in a folder, without those that may have traces of a fault that the witness has found."""
    faults = read_faults(directory)
    return [(name, each) for name, each in manifests_in(directory) if suspicion(each.step, each.witness, faults) is None]


def _is_witnessed(manifest: Manifest, known: Sequence[Manifest]) -> bool:
    """Whether the witness of a model has passed the step of a checkpoint, by what all its checkpoints say."""
    origin = Origin.of(manifest)
    return manifest.step <= passed_until(each.witness for each in known if origin.continues(Origin.of(each)))


def trainer_folders(place: Storage) -> list[str]:
    """Return the ``checkpoint-N`` folders of a Trainer run. Empty if none of them holds a unickpt checkpoint."""
    names = [name for name in place.folders() if TRAINER_FOLDER.fullmatch(name) and not is_checkpoint(place.where(name))]
    return names if any(_holds_checkpoint(place.subfolder(name)) for name in names) else []


def all_manifests(directory: str) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the checkpoints in a folder, also in the ``checkpoint-N`` folders of a Trainer run.

    Raises:
        StorageError: as ``manifests_in``.
    """
    place, found = open_storage(directory), manifests_in(directory)
    for folder in trainer_folders(place):
        found += [(f"{folder}/{name}", manifest) for name, manifest in manifests_in(place.where(folder))]
    return sorted(found, key=lambda each: each[1].step, reverse=True)


def trainer_state_problem(folder: Storage) -> str:
    """Return why Trainer cannot resume from a ``checkpoint-N`` folder as far as its own state file tells, or ''.

    Raises:
        StorageError: the file cannot be read.
    """
    size = folder.size_bytes(TRAINER_STATE)
    if size is None:
        return f"it has no {TRAINER_STATE}, so its save did not finish"
    try:
        sound = isinstance(json.loads(folder.read(TRAINER_STATE, 0, size)), dict)
    except (ValueError, RecursionError):
        sound = False
    return "" if sound else f"{TRAINER_STATE} is damaged, so its save did not finish"


def is_unfinished(storage: Storage) -> bool:
    """Whether a folder holds files of a save, finished or not."""
    return not {DATA_FOLDER, ROWS_FOLDER}.isdisjoint(storage.folders())


def _holds_checkpoint(place: Storage) -> bool:
    inside = [place.subfolder(name) for name in place.folders()]
    return any(is_checkpoint(each.where()) or is_unfinished(each) for each in inside)


def _has_trainer_state(place: Storage, runs: list[str]) -> bool:
    return any(place.subfolder(name).size_bytes(TRAINER_STATE) is not None for name in runs)


def _torn(folder: Storage, *, trainer: bool) -> str:
    """Return ``trainer_state_problem`` where Trainer wrote the folder; other programs write no state file at all."""
    if folder.size_bytes(TRAINER_STATE) is None and not trainer and folder.size_bytes(_TRAINER_ARGUMENTS) is None:
        return ""
    return trainer_state_problem(folder)


def _tag(name: str, storage: Storage) -> TagSummary:
    step = None
    try:
        manifest = read_manifest(storage)
        step = manifest.step
        checked_index(storage, manifest)
    except NotACheckpointError:
        return TagSummary(name, None, False, "the save did not finish")
    except UnickptError as err:
        return TagSummary(name, step, False, str(err))
    return TagSummary(name, step, True, "")


def _complete(storage: Storage) -> Manifest | None:
    """Return the manifest; None if the checkpoint is damaged. An unavailable storage is an error: it says nothing about it."""
    try:
        manifest = read_manifest(storage)
        checked_index(storage, manifest)
        return manifest
    except StorageError:
        raise
    except UnickptError:
        return None
