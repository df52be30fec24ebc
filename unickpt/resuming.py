"""Which checkpoint of a folder a job resumes from: the one that ``latest`` names, or the newest whole one before it.

Reads manifests, never data: whether a checkpoint can be used is known once it is read, so the
caller asks again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass

from unickpt.commit import LATEST_FILE
from unickpt.errors import FormatError, NewerFormatError, StorageError, UnickptError
from unickpt.load.failure import DAMAGE, failure_of
from unickpt.loading import read_manifest
from unickpt.manifest import MANIFEST_FILE, check_path
from unickpt.storage import Storage, join, open_storage

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's scripts write it (megatron/training/checkpointing.py)
_MAX_LATEST_BYTES = 4096
_AGAIN = 20  # times that one being saved again and again is tried again

Identity = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What to try next.

    Attributes:
        tag: None if there is nothing, or nothing more.
        notes: what is wrong with the folder itself, for the log.
    """

    tag: str | None
    notes: tuple[str, ...] = ()


def latest_tag(folder: str | os.PathLike[str]) -> str | None:
    """The tag that ``latest`` names, or None if there is no such file.

    Raises:
        FormatError: it holds no plain name of a directory inside.
        StorageError: it cannot be read.
    """
    place = open_storage(folder)
    size = place.size_bytes(LATEST_FILE)
    if size is None:
        return None
    where = place.where(LATEST_FILE)
    try:
        tag = place.read(LATEST_FILE, 0, min(size, _MAX_LATEST_BYTES)).decode("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or size > _MAX_LATEST_BYTES:
        raise FormatError(f"{where}: does not hold the name of a checkpoint")
    return check_path(tag, where=where)


def iteration_name(iteration: int) -> str:
    """The directory of an iteration, as Megatron's scripts name it."""
    return f"iter_{iteration:07d}"


def tracked_iteration(folder: str | os.PathLike[str]) -> int | None:
    """What Megatron's tracker file names; None if there is none, or if it names a release, which has no iteration.

    Raises:
        FormatError: it holds something else (was the job killed while it was written?).
        StorageError: it cannot be read.
    """
    place = open_storage(folder)
    size = place.size_bytes(TRACKER)
    if size is None:
        return None
    text = place.read(TRACKER, 0, min(size, _MAX_LATEST_BYTES)).decode("utf-8", "replace").strip()
    if text.isdecimal() and text.isascii() and size <= _MAX_LATEST_BYTES:
        return int(text)
    if text == "release":
        return None
    raise FormatError(
        f"{place.where(TRACKER)} holds {text[:40]!r} instead of an iteration (was the job killed while it was written?)"
    )


def whole(folder: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """(step, name) of everything in a folder that has a sound manifest, newest first.

    Raises:
        StorageError: the folder cannot be listed.
    """
    place = open_storage(folder)
    found = []
    for name in place.folders():
        with contextlib.suppress(UnickptError):
            found.append((read_manifest(place.inside(name)).step, name))
    return sorted(found, reverse=True)


def loadable(folder: str | os.PathLike[str], *, without: Collection[str] = ()) -> list[tuple[int, str]]:
    """(step, name) of what may be tried after a damaged checkpoint, newest first.

    Also what a newer release has written: passing it over would resume from an older checkpoint in silence.

    Args:
        folder: of checkpoints.
        without: names that were tried.

    Raises:
        StorageError: the storage does not answer, or does not permit to look. That says nothing of the checkpoints.
    """
    place = open_storage(folder)
    found = []
    for name in place.folders():
        if name in without:
            continue
        inside = place.inside(name)
        try:
            found.append((read_manifest(inside).step, name))
        except NewerFormatError:
            found.append((_step_of_newer(inside), name))
        except UnickptError as err:
            if failure_of(err, rank=0, where=inside.where()).kind not in DAMAGE:
                raise
    return sorted(found, reverse=True)


def _step_of_newer(checkpoint: Storage) -> int:
    """The step in a manifest of a newer format. If it is not where it is in this one, the checkpoint counts as the newest."""
    size = checkpoint.size_bytes(MANIFEST_FILE) or 0
    step = json.loads(checkpoint.read(MANIFEST_FILE, 0, size)).get("step")
    return step if type(step) is int else sys.maxsize


class Candidates:
    """The checkpoints of a folder in the order in which a job tries them; ask again if one turned out to be damaged.

    First what ``latest`` names, or without one Megatron's tracker file; no tag if there is neither (the job is new). If that
    cannot be used, or what it names could not, the newest whole one that was not tried. One that was saved again while it
    was being read comes again: its old files are gone, and its new ones have not been looked at.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._tried: list[str] = []
        self._offered: tuple[str, Identity] | None = None
        self._again = 0
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether something was offered before, or looked for in vain."""
        return self._begun

    def next(self) -> Choice:
        """What to try now."""
        self._begun = True
        choice = self._next()
        if choice.tag is not None:
            self._offered = (choice.tag, identity(join(self._folder, choice.tag)))
            if choice.tag not in self._tried:
                self._tried.append(choice.tag)
        return choice

    def _next(self) -> Choice:
        notes = []
        if self._offered is None:
            try:
                return Choice(latest_tag(self._folder) or self._tracked())
            except StorageError:
                raise  # a storage that does not answer is no reason to resume from an older checkpoint
            except UnickptError as err:
                notes.append(str(err))
        else:
            tag, before = self._offered
            if identity(join(self._folder, tag)) not in (before, None) and self._again < _AGAIN:
                self._again += 1
                return Choice(tag, (f"{join(self._folder, tag)} was saved again while it was being read",))
        older = [name for _, name in loadable(self._folder, without=self._tried)]
        return Choice(older[0] if older else None, tuple(notes))

    def _tracked(self) -> str | None:
        """What Megatron's scripts have saved last, if they have saved it as unickpt."""
        iteration = tracked_iteration(self._folder)
        name = None if iteration is None else iteration_name(iteration)
        if name is None or open_storage(self._folder).inside(name).size_bytes(MANIFEST_FILE) is None:
            return None
        return name


def identity(directory: str) -> Identity:
    """Something that changes when a checkpoint is saved again; None if there is none."""
    storage = open_storage(directory)
    with contextlib.suppress(UnickptError):
        size = storage.size_bytes(MANIFEST_FILE)
        return None if size is None else (size, storage.modified_ns(MANIFEST_FILE))
    return None
