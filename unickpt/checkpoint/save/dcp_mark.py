"""The file by which programs of torch recognise a distributed checkpoint (``torch.distributed.checkpoint``)."""

from __future__ import annotations

from unickpt.checkpoint.format.file_names import DCP_MARK_FILE
from unickpt.checkpoint.storage.open import open_storage

# torch unpickles its own file of this name. "#" begins no pickle, so a program that does so with this one ends with an error.
_TEXT = """\
# A checkpoint of unickpt: manifest.json and index.safetensors describe it. This file is only there to be found.
# For transformers: unickpt export DIR OUT. In PyTorch's format: unickpt export --to dcp DIR OUT.
"""


def mark_for_dcp(directory: str) -> None:
    """Write the file, in place of one of torch: libraries take a folder without it for none of a checkpoint, and begin anew."""
    open_storage(directory).write_atomic(DCP_MARK_FILE, _TEXT.encode())
