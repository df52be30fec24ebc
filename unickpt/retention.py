"""Which checkpoints of a folder stay, and the removal of the others.

Only what unickpt wrote is ever removed, only after a newer checkpoint was committed, and never the
newest whole one or the one that ``latest`` names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unickpt.commit import DATA_FOLDER, HOLD_FILE, ROWS_FOLDER
from unickpt.errors import FormatError, UnickptError
from unickpt.manifest import MANIFEST_FILE
from unickpt.resuming import latest_tag, whole
from unickpt.storage import Storage, open_storage

logger = logging.getLogger("unickpt")

MARK_FILE = "metadata.json"  # Megatron's mark, beside the manifest
README_FILE = "README-unickpt.txt"  # of the DeepSpeed adapter
ABANDONED_S = 3600.0  # a save of which nothing was written for so long is not going on any more


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays besides the newest.

    Attributes:
        keep_last: so many of the newest; 0 keeps all.
        keep_every: also those whose step is a multiple of this; 0 for none.
    """

    keep_last: int = 0
    keep_every: int = 0


def superseded(found: Sequence[tuple[int, str]], policy: Retention, *, protected: Collection[str] = ()) -> list[str]:
    """Names of the checkpoints that go.

    Args:
        found: ``(step, name)`` of all whole checkpoints.
        policy: what stays.
        protected: names that stay in any case.
    """
    if policy.keep_last <= 0:
        return []
    newest_first = sorted(found, reverse=True)
    return [
        name
        for step, name in newest_first[max(policy.keep_last, 1) :]
        if name not in protected and not (policy.keep_every > 0 and step % policy.keep_every == 0)
    ]


def apply(folder: str, policy: Retention, *, just_saved: str, busy: Collection[str] = ()) -> list[str]:
    """Remove what is superseded, and what saves that died have left. The coordinator calls this after a commit.

    Args:
        folder: of the checkpoints.
        policy: what stays.
        just_saved: name of the checkpoint that was committed.
        busy: names of checkpoints that somebody is still working on.

    Returns:
        Names of what was removed.

    Raises:
        StorageError: the folder cannot be listed.
    """
    if policy.keep_last <= 0:
        return []
    place = open_storage(folder)
    protected = {just_saved, *busy}
    with contextlib.suppress(FormatError):  # a damaged ``latest`` names nothing
        protected.add(latest_tag(folder) or just_saved)
    old = superseded(whole(folder), policy, protected=protected)
    gone = [name for name in old if _remove_unless_in_use(folder, place.inside(name), name)]
    dead = [name for name in abandoned(place) if name not in protected]
    left = [name for name in dead if _remove_unless_in_use(folder, place.inside(name), name)]
    if gone or left:
        logger.info("unickpt: removed %s from %s", ", ".join([*gone, *(f"{n} (abandoned)" for n in left)]), folder)
    return [*gone, *left]


def _remove_unless_in_use(folder: str, checkpoint: Storage, name: str) -> bool:
    """Remove a checkpoint, unless another job is saving into it, or has just made it the latest."""
    with contextlib.suppress(UnickptError):
        release = checkpoint.hold(HOLD_FILE)
        if release is None:
            return False
        try:
            with contextlib.suppress(FormatError):
                if latest_tag(folder) == name:
                    return False
            remove(checkpoint)
            return True
        finally:
            release()
            checkpoint.delete_if_empty()
    return False


def abandoned(place: Storage) -> list[str]:
    """Names of folders with parts of a save that never became a checkpoint, and that nobody writes any more."""
    limit_ns = time.time_ns() - int(ABANDONED_S * 1e9)
    found = []
    for name in place.folders():
        with contextlib.suppress(UnickptError):
            inside = place.inside(name)
            if inside.size_bytes(MANIFEST_FILE) is None:
                ours = _own_files(inside)
                if ours and max(map(inside.modified_ns, ours)) < limit_ns:
                    found.append(name)
    return found


def remove(checkpoint: Storage) -> None:
    """Remove what unickpt wrote there: the manifest first, so that the rest is never taken for a checkpoint."""
    checkpoint.delete(MANIFEST_FILE)
    with contextlib.suppress(UnickptError):
        if checkpoint.size_bytes(MANIFEST_FILE) is not None:
            return  # it could not be removed: then the rest has to stay, too
        for name in _own_files(checkpoint):
            checkpoint.delete(name)
        for folder in (DATA_FOLDER, ROWS_FOLDER, ""):
            checkpoint.delete_if_empty(folder)  # stays if somebody else has files there


def _own_files(checkpoint: Storage) -> list[str]:
    inside = f"{DATA_FOLDER}/rank*.safetensors", f"{ROWS_FOLDER}/rank*.safetensors"
    patterns = (*inside, "index*.safetensors", f"{MANIFEST_FILE}.tmp", MARK_FILE, README_FILE, HOLD_FILE)
    names = [name for folder in (DATA_FOLDER, ROWS_FOLDER, "") for name in checkpoint.names(folder)]
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
