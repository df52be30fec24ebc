"""Checkpoints of a save directory, from their manifests, the file ``latest`` and Megatron's tracker file. No data is read."""

from __future__ import annotations

import os
import posixpath
import re
from fnmatch import fnmatchcase

from unickpt.base.errors import FormatError, NotACheckpointError, StorageError, UnickptError, UnsafePathError
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.file_names import MODEL_FILES, MODEL_FOLDER, MODEL_TEMPLATES
from unickpt.checkpoint.format.layout import LATEST_FILE
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, check_path
from unickpt.checkpoint.storage.base import Storage, is_url, split
from unickpt.checkpoint.storage.open import open_storage

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's scripts name it so (megatron/training/checkpointing.py)
ITERATION = "iter_"  # their folder names begin so
RELEASE = "release"  # a checkpoint without an iteration, from which a job starts at iteration 0
_MAX_LATEST_BYTES = 4096
# verl: global_step_10/actor/model; ms-swift: checkpoint-10/iter_0000010; AReaL: epoch1epochstep2globalstep10; torchtitan:
# step-10
_STEP = re.compile(r"(?:step[_-]?|(?:iter|iteration|checkpoint|ckpt)[_-])0*([0-9]{1,15})$", re.IGNORECASE)
_FOLDERS = 5


def read_manifest(checkpoint: Storage) -> Manifest:
    """Read and validate the manifest of a checkpoint.

    Raises:
        NotACheckpointError: the directory has no manifest.
        FormatError: the manifest is malformed or too large.
        StorageError: the storage cannot read it.
    """
    path = checkpoint.where(MANIFEST_FILE)
    size = checkpoint.size_bytes(MANIFEST_FILE)
    if size is None:
        raise NotACheckpointError(
            f"{checkpoint}: no {MANIFEST_FILE}, so this is not a checkpoint: its save did not finish, or unickpt did not write "
            "the directory"
        )
    if size > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: {size:,} bytes are too many for a manifest; the limit is {MAX_MANIFEST_BYTES:,}")
    return manifest_module.from_bytes(checkpoint.read(MANIFEST_FILE, 0, size), where=path)


def step_named(directory: str) -> int:
    """Return the training step in the name of a directory or of a folder above it, else 0."""
    found = (_STEP.search(part) for part in reversed(directory.rstrip("/").split("/")[-_FOLDERS:]))
    return next((int(each[1]) for each in found if each), 0)


def plain_tag(tag: str, folder: str | os.PathLike[str]) -> str:
    """Return the tag of a checkpoint in a folder, such as ``step5`` or ``run/step5``, without a needless ``.`` or ``/``.

    Raises:
        UnsafePathError: it is empty, or leads out of the folder.
    """
    try:
        return check_path(posixpath.normpath(tag) if tag else tag, where=os.fspath(folder))
    except UnsafePathError:
        raise UnsafePathError(
            f"the tag {tag!r} leads out of {os.fspath(folder)}. Pass the name of a folder in it, such as 'step5', and "
            "the other folder as the save directory"
        ) from None


def latest_tag(folder: str | os.PathLike[str]) -> str | None:
    """Return the tag in the file ``latest`` of a folder, or None if there is no such file.

    A person may have made ``latest`` a symbolic link to a checkpoint of the folder. It then names that one.

    Raises:
        FormatError: the file does not hold the plain name of a directory, or the link leads elsewhere.
        StorageError: the storage cannot read it.
    """
    place = open_storage(folder)
    size = place.size_bytes(LATEST_FILE)
    where = place.where(LATEST_FILE)
    if size is None:
        return None if is_url(where) or not os.path.islink(where) else check_path(_linked(where), where=where)
    try:
        tag = place.read(LATEST_FILE, 0, min(size, _MAX_LATEST_BYTES)).decode("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or size > _MAX_LATEST_BYTES:
        raise FormatError(f"{where}: does not hold the name of a checkpoint")
    return check_path(tag, where=where)


def _linked(link: str) -> str:
    """Return the name of the directory beside a symbolic link to which it leads. Raises FormatError."""
    target = os.path.realpath(link)
    if os.path.isdir(target) and os.path.dirname(target) == os.path.realpath(os.path.dirname(link)):
        return os.path.basename(target)
    raise FormatError(
        f"{link}: is a symbolic link to {os.readlink(link)}, which is no checkpoint beside it. Write the name of one into a "
        "file in place of the link"
    )


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Return ``(step, name)`` of the checkpoints in a folder whose manifest is valid, newest first.

    Raises:
        StorageError: as ``manifests_in``.
    """
    return [(manifest.step, name) for name, manifest in manifests_in(folder)]


def manifests_in(folder: str | os.PathLike[str]) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the checkpoints in a folder whose manifest is valid, newest first.

    Raises:
        StorageError: the folder cannot be listed, or a manifest cannot be read. That says nothing about the checkpoint.
    """
    place = open_storage(folder)
    found = []
    for name in place.folders():
        try:
            found.append((name, read_manifest(place.subfolder(name))))
        except StorageError:
            raise
        except UnickptError:
            continue
    return sorted(found, key=lambda each: (each[1].step, each[0]), reverse=True)


def iteration_name(iteration: int) -> str:
    """Return the directory name that Megatron's scripts give an iteration."""
    return f"{ITERATION}{iteration:07d}"


def tracked_iteration(folder: str | os.PathLike[str]) -> int | None:
    """Return the iteration in Megatron's tracker file. None if there is no tracker file, or if it names a release.

    Raises:
        FormatError: the file holds something else, for example because the job was killed while writing it.
        StorageError: the file cannot be read.
    """
    place = open_storage(folder)
    size = place.size_bytes(TRACKER)
    if size is None:
        return None
    text = place.read(TRACKER, 0, min(size, _MAX_LATEST_BYTES)).decode("utf-8", "replace").strip()
    if text.isdecimal() and text.isascii() and size <= _MAX_LATEST_BYTES:
        return int(text)
    if text == RELEASE:
        return None
    raise FormatError(
        f"{place.where(TRACKER)} holds {text[:40]!r} instead of an iteration (was the job killed while it was written?)"
    )


def kept_of_model(checkpoint: Storage) -> list[str]:
    """Return the names of the files of the model that a checkpoint keeps beside its own files, such as ``model/config.json``.

    Raises:
        StorageError: the folder cannot be listed.
    """
    names = [name for name in checkpoint.names(MODEL_FOLDER) if any(fnmatchcase(split(name)[1], each) for each in MODEL_FILES)]
    return [*names, *checkpoint.names(f"{MODEL_FOLDER}/{MODEL_TEMPLATES}")]
