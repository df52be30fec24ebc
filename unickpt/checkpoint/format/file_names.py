"""Names of the files and folders of a checkpoint. This module imports nothing."""

from __future__ import annotations

MANIFEST_FILE = "manifest.json"
DATA_FOLDER = "data"
ROWS_FOLDER = "rows"
DATA_FORMAT = "unickpt-data"  # in the header of a data file
LATEST_FILE = "latest"  # in the save directory
LOCK_FILE = "saving.lock"  # the coordinator locks it during a save
MARK_FILE = "metadata.json"  # by which Megatron recognises a distributed checkpoint; beside the manifest
