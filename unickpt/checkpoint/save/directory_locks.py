"""Locks that prevent two jobs from saving into one directory at the same time. Only the coordinator takes them."""

from __future__ import annotations

from collections.abc import Callable

from unickpt.base.errors import UnickptError
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.format.layout import LOCK_FILE
from unickpt.checkpoint.storage.base import Storage


class DirectoryLocks:
    """Checkpoint directories that this process has locked."""

    def __init__(self) -> None:
        self._releases: dict[str, Callable[[], None]] = {}

    def acquire(self, storage: Storage) -> Failure | None:
        """Lock a checkpoint directory. Returns the failure if another process holds the lock."""
        try:
            release = storage.try_lock(LOCK_FILE)
        except UnickptError:  # the save itself reports what is wrong with the directory
            return None
        if release is None:
            return Failure(
                FailureKind.STORAGE,
                0,
                text=f"{storage.where(LOCK_FILE)} is locked: another process, or another engine of this one, is saving into "
                "this directory. Give each job and each model its own directory, or end the other job.",
            )
        self._releases[storage.where()] = release
        return None

    def release(self, directory: str) -> None:
        """Unlock a directory. Without a lock there is nothing to do."""
        release = self._releases.pop(directory, None)
        if release is not None:
            release()
