"""Notes on the layouts of local checkpoints (``--non-persistent-ckpt-type local``), beside them in their folder.

NVIDIA's resiliency extension writes local checkpoints, which load under the same layout only: under another one Megatron raises
an error, and the job does not start. With these notes a job of another layout sets them aside and resumes from a checkpoint
that it can load.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEPT = 8  # iterations of a note; the extension keeps one or two local checkpoints


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"unickpt_layouts_{rank}.json"


def _notes(folder: str, rank: int) -> dict[str, Any]:
    try:
        found = json.loads(_path(folder, rank).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note(folder: str, rank: int, iteration: int, layout: Mapping[str, Any]) -> None:
    """Note the layout of a local checkpoint that this rank is about to save. An error of the disk is left to the save itself.

    Args:
        folder: ``--non-persistent-local-ckpt-dir``, on the rank's own host.
        rank: of the job.
        iteration: of the checkpoint.
        layout: parallel degrees of the job.
    """
    notes = {**_notes(folder, rank), str(iteration): dict(layout)}
    newest = dict(sorted(notes.items(), key=lambda pair: int(pair[0]))[-KEPT:])
    with contextlib.suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        partial = _path(folder, rank).with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(newest))
        partial.replace(_path(folder, rank))


def other_layout(folder: str, rank: int, iteration: int, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the noted layout of this rank's local checkpoint if it is not ``layout``. None if equal, or without a note."""
    found = _notes(folder, rank).get(str(iteration))
    return found if isinstance(found, dict) and found != dict(layout) else None


def set_aside(manager: Any) -> None:
    """Move this rank's local checkpoints into the folder ``other_layout`` beside them, in place of those that are there.

    The extension refuses to save an iteration while it has a newer one.

    Args:
        manager: ``LocalCheckpointManager`` of the extension.

    Raises:
        OSError: they cannot be moved.
    """
    folder = Path(manager.local_ckpt_dir)
    aside = folder / "other_layout"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in [each for each in folder.glob("iter_*") if each.is_file()]:
        file.replace(aside / file.name)
    manager.latest_iteration = -1  # it keeps the number that it found
