"""The tracker file of the training scripts, and which checkpoints go when it names another (``--save-retain-interval``).

In a job that saves with unickpt only this module writes the file after a save, and only unickpt removes checkpoints. (A load
repairs a file that it cannot parse: ``pretraining/choices.py``.) Megatron does both when its training loop polls a save that
has ended. A later save may have ended by then. Megatron takes what the file says for the checkpoint before its own, and
removes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_unickpt.framework import marks
from unickpt.base.errors import StorageError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import (
    ITERATION,
    RELEASE,
    TRACKER,
    complete_checkpoints,
    iteration_name,
    manifests_in,
    tracked_iteration,
)
from unickpt.checkpoint.format.layout import DCP_MARK_FILE, MARK_FILE
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.save import retention
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.storage.base import split
from unickpt.checkpoint.storage.open import open_storage

_NATIVE_MARKS = (MARK_FILE, DCP_MARK_FILE)  # Megatron writes one of them when a checkpoint of its own is complete


class Diverted:
    """Tells the name under which Megatron writes the tracker file from names that it reads.

    In a save, rank 0 asks for the name to write first.
    """

    def __init__(self) -> None:
        self._asked = False

    def take(self) -> bool:
        """Return whether this request for the name is the first one."""
        first, self._asked = not self._asked, True
        return first


class Trackers:
    """The tracker files of this process. Used on rank 0, from the training thread and from the threads of saves."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._begun = 0
        self._named: dict[str, int] = {}  # folder -> order of the save that its file names
        self._replaced: dict[str, set[str]] = {}  # folder -> checkpoints that its file has named before
        self._native: dict[str, set[str]] = {}  # folder -> checkpoints that Megatron saved in the place of unickpt

    def begin(self) -> int:
        """Return the order of a save that begins. Saves may end in another order."""
        self._begun += 1
        return self._begun

    def name(self, directory: str, order: int, *, replaces: bool = True, native: bool = False) -> None:
        """Let the tracker file name a checkpoint that is complete, unless it names one of a later save of this job.

        Args:
            directory: the checkpoint.
            order: of its save.
            replaces: the checkpoint takes the place of the one that the file names, which ``remove_replaced`` may remove.
            native: it has Megatron's own format.

        Raises:
            StorageError: the file cannot be written. It names the checkpoint before, which stays.
        """
        folder, name = split(directory)
        text = _text_of(name)
        if not text:
            return
        with self._gate:
            replaced = self._replaced.setdefault(folder, set()) if replaces else set()
            if native:
                self._native.setdefault(folder, set()).add(name)
            else:
                self._native.get(folder, set()).discard(name)
            if self._named.get(folder, 0) > order:
                replaced.add(name)
                return
            before = _tracked(folder)
            open_storage(folder).write_atomic(TRACKER, text.encode())
            self._named[folder] = order
            replaced.discard(name)
            if before is not None and before != name:
                replaced.add(before)

    def remove_replaced(self, folder: str, policy: Retention, *, busy: Collection[str] = ()) -> None:
        """Remove the checkpoints that a policy does not keep, except those that ``retention.apply`` removes. Never raises.

        Without ``keep_last``, they are those that the file has named before, as in Megatron.

        Args:
            folder: folder of the checkpoints.
            policy: retention policy. ``also_every`` is ``--save-retain-interval``.
            busy: names of checkpoints that are in use. The next call removes them.
        """
        with self._gate:
            tracked = _tracked(folder)
            native, replaced = self._native.get(folder, set()), self._replaced.get(folder, set())
            try:
                old = old_native(native, folder, policy) if policy.keep_last else old_replaced(replaced, tracked, policy)
            except UnickptError as err:
                logger.warning("unickpt: older checkpoints in %s were not removed: %s", folder, err)
                return
            kept = _witnessed(folder) if old else set()
            chosen = [name for name in old if name not in busy and name != tracked and name not in kept]
            for name in chosen:  # another thread does not take them too
                native.discard(name)
                replaced.discard(name)
            if policy.keep_last or not policy.also_every:
                replaced.clear()
        removed = [name for name in chosen if _removed(folder, name)]
        if removed:
            logger.info("unickpt: removed %s from %s", ", ".join(removed), folder)


def _witnessed(folder: str) -> set[str]:
    """Return the checkpoint that the witness needs. A folder that cannot be read tells none."""
    with contextlib.suppress(UnickptError):
        return retention.witnessed(folder, manifests_in(folder))
    return set()


def old_replaced(names: Iterable[str], tracked: str | None, policy: Retention) -> list[str]:
    """Return which checkpoints ``--save-retain-interval`` removes, of those that the tracker file has named before.

    A higher iteration than the file names stays: the job went back to an earlier checkpoint, and the later ones may be wanted.
    """
    every, newest = policy.also_every, iteration_of(tracked or "")
    if not every or newest is None:
        return []
    found = ((iteration_of(name), name) for name in names)
    return [name for iteration, name in sorted(found, key=str) if iteration and iteration < newest and iteration % every]


def old_native(names: Collection[str], folder: str, policy: Retention) -> list[str]:
    """Return which checkpoints of Megatron's own format ``keep_last`` removes, of those that this job has saved.

    Raises:
        StorageError: the folder cannot be listed.
    """
    if not names:
        return []
    complete = [*complete_checkpoints(folder), *((iteration_of(name) or 0, name) for name in names)]
    return [name for name in retention.superseded(complete, policy) if name in names]


def remove_old_non_persistent(folder: str, leave: int, *, busy: Collection[str]) -> None:
    """Remove non-persistent checkpoints but the newest complete ones, before the next one is saved.

    Megatron counts a checkpoint that is still being written, and would remove the only complete one.

    Args:
        folder: folder of the non-persistent checkpoints.
        leave: number of complete checkpoints that stay.
        busy: names of checkpoints that are being written or uploaded.
    """
    if not os.path.isdir(folder):
        return
    names = [entry.name for entry in os.scandir(folder) if iteration_of(entry.name) is not None and entry.is_dir()]
    names.sort(key=lambda name: iteration_of(name) or 0)
    complete = [name for name in names if is_complete(os.path.join(folder, name))]
    keep = {*complete[max(len(complete) - leave, 0) :], *busy, _tracked(folder), *_witnessed(folder)}
    removed = [name for name in names if name not in keep and _removed(folder, name)]
    if removed:
        logger.info("unickpt: removed %s from %s", ", ".join(removed), folder)


def is_complete(directory: str) -> bool:
    """Return whether a directory holds a checkpoint of unickpt, or one that Megatron has finished."""
    place = Path(directory)
    if (place / MANIFEST_FILE).is_file():
        return True
    native = any((place / name).is_file() for name in _NATIVE_MARKS)
    return native and not marks.recognises(place)  # the mark of unickpt stays if the removal of a checkpoint is interrupted


def iteration_of(name: str) -> int | None:
    """Return the iteration of a directory name of Megatron's scripts; None for any other name."""
    digits = name.removeprefix(ITERATION)
    return int(digits) if name.startswith(ITERATION) and digits.isascii() and digits.isdigit() else None


def _text_of(name: str) -> str:
    iteration = iteration_of(name)
    return RELEASE if name == RELEASE else "" if iteration is None else str(iteration)


def _tracked(folder: str) -> str | None:
    """Return the name of the checkpoint that the tracker file names; None without one, or if it cannot be read."""
    with contextlib.suppress(UnickptError, OSError):
        iteration = tracked_iteration(folder)
        return None if iteration is None else iteration_name(iteration)
    return None


def _removed(folder: str, name: str) -> bool:
    if os.path.islink(os.path.join(folder, name)):
        return False
    try:
        return retention.remove_whole(folder, name)
    except (OSError, StorageError) as err:
        logger.warning("unickpt: %s in %s was not removed: %s", name, folder, err)
        return False
