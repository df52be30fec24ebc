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

from unickpt.commit import DATA_FOLDER, LATEST_FILE, ROWS_FOLDER
from unickpt.errors import UnickptError
from unickpt.loading import read_manifest
from unickpt.manifest import MANIFEST_FILE
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


def whole(folder: str | Path) -> list[tuple[int, str]]:
    """(step, name) of every directory in a folder that has a sound manifest, newest first."""
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else []:
        if (path / MANIFEST_FILE).is_file():
            with contextlib.suppress(UnickptError, OSError):
                found.append((read_manifest(PosixStorage(path)).step, path.name))
    return sorted(found, reverse=True)


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
    latest = Path(folder) / LATEST_FILE
    protected = {just_saved}
    with contextlib.suppress(OSError):
        protected.add(latest.read_text().strip())
    gone = superseded(whole(folder), policy, protected=protected)
    for name in gone:
        remove(Path(folder) / name)
    left = [name for name in abandoned(folder) if name not in protected]
    for name in left:
        remove(Path(folder) / name)
    if gone or left:
        logger.info("unickpt: removed %s from %s", ", ".join([*gone, *(f"{n} (abandoned)" for n in left)]), folder)
    return [*gone, *left]


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
    patterns = (*inside, "index*.safetensors", f"{MANIFEST_FILE}.tmp", MARK_FILE)
    return [file for pattern in patterns for file in directory.glob(pattern)]
