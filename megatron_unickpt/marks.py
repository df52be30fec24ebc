"""Files by which Megatron finds a checkpoint: the format mark in its directory, and the tracker file of the scripts."""

from __future__ import annotations

import json
from pathlib import Path

from unickpt.errors import UnickptError
from unickpt.load.candidates import TRACKER
from unickpt.load.validation import is_checkpoint
from unickpt.storage.base import read_text, split
from unickpt.storage.open import open_storage

BACKEND, VERSION = "unickpt", 1
CONFIG_FILE = "metadata.json"  # Megatron's mark of a distributed checkpoint


def recognises(checkpoint_dir: str | Path | None) -> bool:
    """Return whether a directory holds a unickpt checkpoint, or has the mark of one whose manifest is missing.

    Without a manifest the load raises unickpt's error, which is more precise than Megatron's "unknown strategy".
    """
    return checkpoint_dir is not None and (is_checkpoint(str(checkpoint_dir)) or _marked(str(checkpoint_dir)))


def _marked(directory: str) -> bool:
    try:
        found = json.loads(read_text(open_storage(directory), CONFIG_FILE) or "null")
    except (UnickptError, OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == BACKEND


def mark(directory: str) -> None:
    """Write Megatron's mark, so that Megatron's tools recognise the format. A load uses only the manifest."""
    place = open_storage(directory)
    if place.size_bytes(CONFIG_FILE) is not None:
        return
    text = json.dumps(
        {
            "sharded_backend": BACKEND, "sharded_backend_version": VERSION,
            "common_backend": BACKEND, "common_backend_version": VERSION,
        }
    )  # fmt: skip
    place.write_atomic(CONFIG_FILE, text.encode())


def track(directory: str) -> None:
    """Write the scripts' tracker file for a committed checkpoint; called on the coordinator.

    Megatron writes it again when it finalizes the save. A job that is preempted before that keeps the checkpoint.
    """
    folder, name = split(directory)
    if name.startswith("iter_") and name[5:].isdigit():
        open_storage(folder).write_atomic(TRACKER, str(int(name[5:])).encode())
