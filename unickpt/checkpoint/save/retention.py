"""Removal of old checkpoints.

Only files written by unickpt are removed (``remove_whole`` removes the folder), and only after a newer checkpoint was
committed. The newest complete checkpoint always stays, and so do those that ``latest`` and Megatron's tracker file name, and
the newest one that the witness has nothing to say against.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

from unickpt.base.errors import ConfigError, FormatError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import iteration_name, kept_of_model, latest_tag, manifests_in, tracked_iteration
from unickpt.checkpoint.coordination.owners import Origin
from unickpt.checkpoint.format.file_names import MODEL_FOLDER, MODEL_TEMPLATES
from unickpt.checkpoint.format.layout import DATA_FOLDER, DCP_MARK_FILE, LOCK_FILE, MARK_FILE, ROWS_FOLDER
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from unickpt.checkpoint.format.witnessed import needed, passed_until, suspicion
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.open import open_storage
from unickpt.checkpoint.witness_faults import read_faults

README_FILE = "README-unickpt.txt"  # written by the DeepSpeed adapter
ABANDONED_S = 3600.0  # a save without a write for this time is considered dead


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention policy.

    Attributes:
        keep_last: number of most recent checkpoints to keep; 0 keeps all.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 for none.
        also_every: a second ``keep_every``; 0 for none. Megatron's ``--save-retain-interval``.

    Raises:
        ConfigError: a value is not a whole number, or negative.
    """

    keep_last: int = 0
    keep_every: int = 0
    also_every: int = 0

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "also_every"):
            value = getattr(self, name)
            if not (isinstance(value, Integral) and int(value) >= 0):
                raise ConfigError(f"{name} must be a whole number, at least 0, not {value!r}")

    def keeps(self, step: int) -> bool:
        """Return whether a checkpoint stays because of its step."""
        return any(every > 0 and step % every == 0 for every in (self.keep_every, self.also_every))


def superseded(found: Sequence[tuple[int, str]], policy: Retention, *, protected: Collection[str] = ()) -> list[str]:
    """Return the names to remove of all complete checkpoints, ``(step, name)``. Those that are ``protected`` stay."""
    if policy.keep_last <= 0:
        return []
    newest_first = sorted(found, reverse=True)
    return [name for step, name in newest_first[max(policy.keep_last, 1) :] if name not in protected and not policy.keeps(step)]


def apply(folder: str, policy: Retention, *, just_saved: str, busy: Collection[str] = ()) -> list[str]:
    """Remove superseded checkpoints and remains of dead saves, and return their names. Runs on the coordinator after a commit.

    The policy counts the checkpoints of the model that was just saved, so models with tags of their own can share a folder.

    Args:
        just_saved: name of the committed checkpoint.
        busy: names of checkpoints that are in use, such as by an upload.

    Raises:
        StorageError: the folder cannot be listed.
    """
    if policy.keep_last <= 0:
        return []
    place = open_storage(folder)
    own = _of_one_model(folder, just_saved)
    found = [(manifest.step, name) for name, manifest in own]
    protected = {just_saved, *busy, *named(folder), *witnessed(folder, own)}
    old = superseded(found, policy, protected=protected)
    removed = [name for name in old if _remove_unless_in_use(folder, place.subfolder(name), name)]
    dead = [name for name in abandoned(place) if name not in protected]
    cleaned = [name for name in dead if _remove_unless_in_use(folder, place.subfolder(name), name)]
    if removed or cleaned:
        logger.info("unickpt: removed %s from %s", ", ".join([*removed, *(f"{n} (abandoned)" for n in cleaned)]), folder)
    return [*removed, *cleaned]


def _of_one_model(folder: str, just_saved: str) -> list[tuple[str, Manifest]]:
    """Return names and manifests of the complete checkpoints of the model that was just saved. Other models have their own."""
    found = [(name, manifest, Origin.of(manifest)) for name, manifest in manifests_in(folder)]
    own = next((origin for name, _, origin in found if name == just_saved), Origin())
    return [(name, manifest) for name, manifest, origin in found if own.continues(origin)]


def witnessed(folder: str, found: Sequence[tuple[str, Manifest]]) -> set[str]:
    """Return the checkpoint that a roll-back needs, of the complete ones of a model; empty if no witness has passed one.

    Raises:
        FormatError, StorageError: the file with the faults that a witness has found cannot be read.
    """
    if all(manifest.witness is None for _, manifest in found):
        return set()
    faults = read_faults(folder)
    sound = [(name, each) for name, each in found if suspicion(each.step, each.witness, faults) is None]
    name = needed([(manifest.step, name) for name, manifest in sound], passed_until(each.witness for _, each in sound))
    return set() if name is None else {name}


def named(folder: str) -> set[str]:
    """Return the names of the checkpoints that ``latest`` and Megatron's tracker file name. A damaged file names none."""
    found = set()
    with contextlib.suppress(FormatError):
        found.add(latest_tag(folder))
    with contextlib.suppress(FormatError):
        iteration = tracked_iteration(folder)
        found.add(None if iteration is None else iteration_name(iteration))
    return {name for name in found if name is not None}


def _remove_unless_in_use(folder: str, checkpoint: Storage, name: str) -> bool:
    """Remove a checkpoint unless another job saves into it or a file names it now. Return whether it was removed."""
    with contextlib.suppress(UnickptError):
        release = checkpoint.try_lock(LOCK_FILE)
        if release is None:
            return False
        try:
            if name in named(folder):
                return False
            remove(checkpoint)
            return True
        finally:
            release()
            checkpoint.delete_if_empty()
    return False


def abandoned(place: Storage) -> list[str]:
    """Return the names of folders with files of an uncommitted save that has not written for ``ABANDONED_S``."""
    limit_ns = time.time_ns() - int(ABANDONED_S * 1e9)
    found = []
    for name in place.folders():
        with contextlib.suppress(UnickptError):
            inside = place.subfolder(name)
            if inside.size_bytes(MANIFEST_FILE) is None:
                ours = _own_files(inside)
                if ours and max(map(inside.modified_ns, ours)) < limit_ns:
                    found.append(name)
    return found


def remove(checkpoint: Storage) -> None:
    """Remove the files of unickpt from a folder. The manifest goes first, so the rest is never taken for a checkpoint."""
    checkpoint.delete(MANIFEST_FILE)
    with contextlib.suppress(UnickptError):
        if checkpoint.size_bytes(MANIFEST_FILE) is not None:
            return  # the manifest could not be removed, so the other files have to stay
        for name in (*_own_files(checkpoint), *kept_of_model(checkpoint)):
            checkpoint.delete(name)
        for folder in (DATA_FOLDER, ROWS_FOLDER, f"{MODEL_FOLDER}/{MODEL_TEMPLATES}", MODEL_FOLDER, ""):
            checkpoint.delete_if_empty(folder)  # stays if it has other files


def remove_whole(folder: str, name: str) -> bool:
    """Remove a local folder of a checkpoint with all that is in it, unless another job saves into it. Return whether it did.

    The manifest goes first, so that the rest is never taken for a checkpoint.

    Raises:
        OSError, StorageError: it could not be removed, or only in part.
    """
    checkpoint = open_storage(folder).subfolder(name)
    release = checkpoint.try_lock(LOCK_FILE)
    if release is None:
        return False
    try:
        checkpoint.delete(MANIFEST_FILE)
        if checkpoint.size_bytes(MANIFEST_FILE) is not None:
            return False
        shutil.rmtree(os.path.join(folder, name))
    finally:
        release()
        checkpoint.delete_if_empty()
    return True


def _own_files(checkpoint: Storage) -> list[str]:
    inside = f"{DATA_FOLDER}/rank*.safetensors", f"{ROWS_FOLDER}/rank*.safetensors"
    patterns = (*inside, "index*.safetensors", f"{MANIFEST_FILE}.tmp", MARK_FILE, DCP_MARK_FILE, README_FILE, LOCK_FILE)
    names = [name for folder in (DATA_FOLDER, ROWS_FOLDER, "") for name in checkpoint.names(folder)]
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
