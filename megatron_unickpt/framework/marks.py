"""The file by which Megatron recognises the format of a checkpoint directory (``tracker`` has the one of the folder)."""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

from unickpt.base.errors import UnickptError
from unickpt.base.switch import switch
from unickpt.checkpoint.format.layout import DATA_FOLDER, DCP_MARK_FILE, LOCK_FILE, MARK_FILE, ROWS_FOLDER
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save.dcp_mark import mark_for_dcp
from unickpt.checkpoint.save.replaced import remove_replaced
from unickpt.checkpoint.storage.base import read_text
from unickpt.checkpoint.storage.open import open_storage

BACKEND, VERSION = "unickpt", 1
_OF_MEGATRON = ("*.distcp", "common.pt", DCP_MARK_FILE)  # torch_dist; mp_rank_* are folders of torch


def recognises(checkpoint_dir: str | Path | None) -> bool:
    """Return whether a directory holds a unickpt checkpoint, or has the mark of one whose manifest is missing.

    Without a manifest the load raises unickpt's error, which is more precise than Megatron's "unknown strategy".
    """
    return checkpoint_dir is not None and (is_checkpoint(str(checkpoint_dir)) or _marked(str(checkpoint_dir)))


def _marked(directory: str) -> bool:
    try:
        found = json.loads(read_text(open_storage(directory), MARK_FILE) or "null")
    except (UnickptError, OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == BACKEND


def is_unfinished(directory: Path) -> bool:
    """Return whether a directory without a manifest has only what a save of unickpt leaves if it does not end."""
    own = (DATA_FOLDER, ROWS_FOLDER, MARK_FILE, DCP_MARK_FILE, LOCK_FILE, "index*.safetensors", f"{MANIFEST_FILE}*")
    names = [entry.name for entry in os.scandir(directory)]
    return all(any(fnmatch.fnmatch(name, pattern) for pattern in own) for name in names) and (
        MARK_FILE not in names or _marked(str(directory))
    )


def complete(directory: str) -> None:
    """Complete the folder of a committed checkpoint: mark it, and remove what Megatron had saved there itself."""
    place = open_storage(directory)
    if place.size_bytes(MARK_FILE) is not None and not _marked(directory):
        place.delete(MARK_FILE)
        remove_replaced(directory, "Megatron", _OF_MEGATRON, ("mp_rank_*",))
    elif place.size_bytes(MARK_FILE) is None:
        remove_replaced(directory, "Megatron", (), ("mp_rank_*",))
    mark(directory)


def mark(directory: str) -> None:
    """Write Megatron's mark, so that Megatron's tools recognise the format. A load uses only the manifest.

    With the switch ``UNICKPT`` also torch's: libraries take a folder without it for none of a checkpoint, and begin anew.
    """
    place = open_storage(directory)
    if switch().saves and place.size_bytes(DCP_MARK_FILE) is None:
        mark_for_dcp(directory)
    if place.size_bytes(MARK_FILE) is not None:
        return
    text = json.dumps(
        {
            "sharded_backend": BACKEND,
            "sharded_backend_version": VERSION,
            "common_backend": BACKEND,
            "common_backend_version": VERSION,
        }
    )
    place.write_atomic(MARK_FILE, text.encode())
