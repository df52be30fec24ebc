"""Names of the files in a checkpoint directory, and of the tensors in its files."""

from __future__ import annotations

from dataclasses import dataclass

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.file_names import (
    DATA_FOLDER,
    DCP_MARK_FILE,
    LATEST_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    MARK_FILE,
    ROWS_FOLDER,
)
from unickpt.checkpoint.format.index import TensorInfo

SHARED_PREFIX = "objects/shared/"  # objects that every rank may read by name
SHARED_TENSORS_PREFIX = "objects/shared-tensors/"

__all__ = [
    "DATA_FOLDER", "DCP_MARK_FILE", "LATEST_FILE", "LOCK_FILE", "MANIFEST_FILE", "MARK_FILE", "ROWS_FOLDER", "SHARED_PREFIX",
    "SHARED_TENSORS_PREFIX", "RankFiles", "fragment_key", "index_name",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankFiles:
    """File names of one rank in one generation. Every save under the same tag uses new names."""

    rank: int
    generation: int

    @property
    def _stem(self) -> str:
        return f"rank{self.rank:05d}" + (f".{self.generation}" if self.generation else "")

    @property
    def data(self) -> str:
        return f"{DATA_FOLDER}/{self._stem}.safetensors"

    @property
    def rows(self) -> str:
        return f"{ROWS_FOLDER}/{self._stem}.safetensors"


def index_name(generation: int) -> str:
    """Return the file name of the index of one generation."""
    return f"index.{generation}.safetensors" if generation else "index.safetensors"


def fragment_key(tensor: TensorInfo, box: Box) -> str:
    """Return the key of a fragment in its data file: ``name:state``, followed by the box unless it covers the tensor."""
    key = f"{tensor.name}:{tensor.state}"
    return key if box == Box.whole(tensor.shape) else f"{key}{box}"
