"""Find the checkpoint of a folder that a job resumes from: the one that ``latest`` names, or the newest complete one before it.

Reads manifests, never data. Damaged data shows only when it is read; the caller then asks for the next candidate.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unickpt.base.errors import NewerFormatError, StorageError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import (
    complete_checkpoints,
    iteration_name,
    latest_tag,
    read_manifest,
    tracked_iteration,
)
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.format.witnessed import WitnessFault, suspicion
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.base import Storage, join, split
from unickpt.checkpoint.storage.open import open_storage
from unickpt.checkpoint.witness_faults import read_faults

_AGAIN = 20  # attempts to load a checkpoint that is saved again each time

Identity = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CandidateTag:
    """The next checkpoint to try.

    Attributes:
        tag: directory name in the folder. None if no candidate is left.
        notes: problems of the folder itself, for the log.
    """

    tag: str | None
    notes: tuple[str, ...] = ()


def loadable(folder: str | os.PathLike[str], *, without: Collection[str] = ()) -> list[tuple[int, str]]:
    """Return (step, name) of every checkpoint of a folder that a job can try after a damaged one, newest first.

    The list includes checkpoints of a newer release. Skipping one would silently resume from an older checkpoint.

    Raises:
        StorageError: the folder or a manifest cannot be read for a reason that says nothing about the checkpoint, such as a
            refused permission.
    """
    place = open_storage(folder)
    found = []
    for name in place.folders():
        if name in without:
            continue
        inside = place.subfolder(name)
        try:
            found.append((read_manifest(inside).step, name))
        except NewerFormatError:
            found.append((_step_of_newer(inside), name))
        except UnickptError as err:
            if failure_of(err, rank=0, where=inside.where()).kind not in DAMAGE:
                raise
    return sorted(found, reverse=True)


def _step_of_newer(checkpoint: Storage) -> int:
    """Return the step in a manifest of a newer format. If it is not where this format has it, count it as the newest."""
    size = checkpoint.size_bytes(MANIFEST_FILE) or 0
    step = json.loads(checkpoint.read(MANIFEST_FILE, 0, size)).get("step")
    return step if type(step) is int else sys.maxsize


class Candidates:
    """The checkpoints of a folder, in the order in which a job tries them.

    The first candidate is the tag in ``latest``, or else the one in Megatron's tracker file. Without either file the job is
    new and there is no candidate, or with ``newest`` it is the newest complete checkpoint. Each later candidate is the
    newest complete checkpoint that was not tried. Checkpoints that may have traces of a fault that the witness has found are
    left out. A checkpoint that was saved again while it was read is offered again,
    because its old files are gone.

    Args:
        folder: folder of checkpoints. A path or a URL.
        newest: whether checkpoints count that neither ``latest`` nor a tracker file names.
    """

    def __init__(self, folder: str | os.PathLike[str], *, newest: bool = False) -> None:
        self._folder, self._newest = os.fspath(folder), newest
        self._tried: list[str] = []
        self._offered: tuple[str, Identity] | None = None
        self._again = 0
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether ``next`` was called before."""
        return self._begun

    def offer(self) -> Offer:
        """Return the next checkpoint to try: the folder itself if it is one. Reads manifests, no data."""
        if not self._begun and is_checkpoint(self._folder):
            warn_of_suspicion(*split(self._folder.rstrip("/")))
            return Offer(self._folder, explicit=True)
        choice = self.next()
        if choice.tag is None:
            return Offer(present=tuple(name for _, name in complete_checkpoints(self._folder)), notes=choice.notes)
        return Offer(join(self._folder, choice.tag), choice.tag, notes=choice.notes)

    def next(self) -> CandidateTag:
        """Return the next checkpoint to try."""
        self._begun = True
        choice = self._next()
        if choice.tag is not None:
            self._offered = (choice.tag, identity(join(self._folder, choice.tag)))
            if choice.tag not in self._tried:
                self._tried.append(choice.tag)
        return choice

    def _next(self) -> CandidateTag:
        notes = []
        if self._offered is None:
            try:
                named = latest_tag(self._folder) or self._tracked()
                suspect = "" if named is None else why_suspect(self._folder, named, read_faults(self._folder))
                if suspect:
                    notes.append(suspect)
                elif named is not None or not self._newest:
                    return CandidateTag(named)
            except StorageError:
                raise  # an unavailable storage must not lead to an older checkpoint
            except UnickptError as err:
                notes.append(str(err))
        else:
            tag, before = self._offered
            if identity(join(self._folder, tag)) not in (before, None) and self._again < _AGAIN:
                self._again += 1
                return CandidateTag(tag, (f"{join(self._folder, tag)} was saved again while it was being read",))
        faults = read_faults(self._folder)
        older = (name for _, name in loadable(self._folder, without=self._tried))
        return CandidateTag(next((name for name in older if not why_suspect(self._folder, name, faults)), None), tuple(notes))

    def _tracked(self) -> str | None:
        """Return the directory that Megatron's tracker file names, if it holds a unickpt checkpoint."""
        iteration = tracked_iteration(self._folder)
        name = None if iteration is None else iteration_name(iteration)
        if name is None or open_storage(self._folder).subfolder(name).size_bytes(MANIFEST_FILE) is None:
            return None
        return name


def warn_of_suspicion(folder: str, name: str) -> None:
    """Warn if a checkpoint that the user names may have traces of a fault that the witness has found. It is loaded."""
    with contextlib.suppress(UnickptError):
        suspect = why_suspect(folder, name, read_faults(folder))
        if suspect:
            logger.warning("unickpt: %s. It is loaded, because it was named", suspect)


def why_suspect(folder: str, name: str, faults: Sequence[WitnessFault]) -> str:
    """Return why a job must not resume from a checkpoint, or ''. One that cannot be read is no matter of the witness."""
    if not faults:
        return ""
    place = open_storage(folder).subfolder(name)
    with contextlib.suppress(UnickptError):
        manifest = read_manifest(place)
        fault = suspicion(manifest.step, manifest.witness, faults)
        if fault is not None:
            return f"{place} is of step {manifest.step}, and may have traces of a fault after step {fault.after}: {fault.text}"
    return ""


def identity(directory: str) -> Identity:
    """Return a value that changes when a checkpoint is saved again. None if there is no manifest."""
    storage = open_storage(directory)
    with contextlib.suppress(UnickptError):
        size = storage.size_bytes(MANIFEST_FILE)
        return None if size is None else (size, storage.modified_ns(MANIFEST_FILE))
    return None
