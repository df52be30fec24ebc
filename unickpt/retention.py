"""Which checkpoints of a folder stay, and the removal of the others.

Only what unickpt wrote is ever removed, only after a newer checkpoint was committed, and never the
newest whole one or the one that ``latest`` names.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.commit import DATA_FOLDER, HOLD_FILE, ROWS_FOLDER
from unickpt.errors import FormatError, UnickptError
from unickpt.manifest import MANIFEST_FILE
from unickpt.resuming import latest_tag, whole
from unickpt.storage import PosixStorage

logger = logging.getLogger("unickpt")

MARK_FILE = "metadata.json"  # Megatron's mark, beside the manifest
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


def apply(folder: str, policy: Retention, *, just_saved: str) -> list[str]:
    """Remove what is superseded, and what saves that died have left. The coordinator calls this after a commit.

    Args:
        folder: of the checkpoints.
        policy: what stays.
        just_saved: name of the checkpoint that was committed.

    Returns:
        Names of what was removed.
    """
    if policy.keep_last <= 0:
        return []
    protected = {just_saved}
    with contextlib.suppress(UnickptError):  # a damaged one names nothing
        protected.add(latest_tag(folder) or just_saved)
    gone = superseded(whole(folder), policy, protected=protected)
    gone = [name for name in gone if _remove_unless_in_use(folder, name)]
    left = [name for name in abandoned(folder) if name not in protected and _remove_unless_in_use(folder, name)]
    if gone or left:
        logger.info("unickpt: removed %s from %s", ", ".join([*gone, *(f"{n} (abandoned)" for n in left)]), folder)
    return [*gone, *left]


def _remove_unless_in_use(folder: str, name: str) -> bool:
    """Remove a checkpoint, unless another job is saving into it, or has just made it the latest."""
    with contextlib.suppress(UnickptError):
        release = PosixStorage(Path(folder) / name).hold(HOLD_FILE)
        if release is None:
            return False
        try:
            with contextlib.suppress(FormatError):  # a damaged ``latest`` names nothing
                if latest_tag(folder) == name:
                    return False
            remove(Path(folder) / name)
            return True
        finally:
            release()
    return False


def abandoned(folder: str | Path) -> list[str]:
    """Names of directories with parts of a save that never became a checkpoint, and that nobody writes any more."""
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else []:
        ours = _own_files(path)
        if ours and not (path / MANIFEST_FILE).exists():
            with contextlib.suppress(OSError):
                if max(file.stat().st_mtime for file in ours) < time.time() - ABANDONED_S:
                    found.append(path.name)
    return sorted(found)


def remove(directory: Path) -> None:
    """Remove what unickpt wrote there: the manifest first, so that the rest is never taken for a checkpoint."""
    with contextlib.suppress(OSError):
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
    for file in _own_files(directory):
        with contextlib.suppress(OSError):
            file.unlink()
    for inner in (directory / DATA_FOLDER, directory / ROWS_FOLDER, directory):
        with contextlib.suppress(OSError):
            inner.rmdir()  # stays if somebody else has files there


def _own_files(directory: Path) -> list[Path]:
    inside = f"{DATA_FOLDER}/rank*.safetensors", f"{ROWS_FOLDER}/rank*.safetensors"
    patterns = (*inside, "index*.safetensors", f"{MANIFEST_FILE}.tmp", MARK_FILE, HOLD_FILE)
    return [file for pattern in patterns for file in directory.glob(pattern)]
