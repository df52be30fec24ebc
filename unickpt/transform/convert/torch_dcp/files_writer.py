"""Writer of the files of ``torch.distributed.checkpoint``, block by block.

Each block of a tensor is an archive of ``torch.save`` (``_write_item`` in torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.torch_dcp.files import METADATA

BLOCK_ELEMENTS = 8 << 20  # elements of one block, which is in memory and becomes one archive
_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION


class DcpWriter:
    """Writer of data files and of the table. The table is written last and commits the checkpoint.

    Args:
        folder: output directory.
        limit: file size in bytes after which a new file is started.

    Attributes:
        names: names of the files.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self.names: list[str] = []
        self._file: BinaryIO | None = None
        self._state: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def _key(self, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        self._paths[key] = path
        return key

    def _place(self, data: Any) -> Any:
        """Write an object as an archive and return its storage entry."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        if self._file is None or self._file.tell() >= self._limit:
            if self._file is not None:
                self._file.close()
            self.names.append(f"__0_{len(self.names)}.distcp")
            self._file = (self._folder / self.names[-1]).open("wb")
        begin = self._file.tell()
        archive = io.BytesIO()
        torch.save(data, archive)
        self._file.write(archive.getbuffer())
        return _StorageInfo(self.names[-1], begin, self._file.tell() - begin)

    def tensor(self, path: tuple[str, ...], shape: tuple[int, ...], box: Box, data: torch.Tensor) -> None:
        """Write a box of a tensor. The caller writes boxes that cover the tensor."""
        from torch.distributed.checkpoint import metadata as made

        key = self._key(path)
        entry = self._state.setdefault(
            key, made.TensorStorageMetadata(made.TensorProperties(dtype=data.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(made.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)))
        self._storage[made.MetadataIndex(key, box.start, len(entry.chunks) - 1)] = self._place(data)

    def object(self, path: tuple[str, ...], value: Any) -> None:
        """Write an object that can be pickled."""
        from torch.distributed.checkpoint import metadata as made

        key = self._key(path)
        self._state[key] = made.BytesStorageMetadata()
        self._storage[made.MetadataIndex(key)] = self._place(value)

    def alias(self, path: tuple[str, ...], key: str) -> None:
        """Add a further name of a written tensor, for the same bytes. An unknown ``key`` is ignored."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        alias = ".".join(path)
        if key in self._state and alias not in self._state:
            entry = self._state[key]
            self._state[self._key(path)] = dataclasses.replace(entry, chunks=list(entry.chunks))
            for chunk in entry.chunks:
                self._storage[MetadataIndex(alias, chunk.offsets)] = self._storage[MetadataIndex(key, chunk.offsets)]

    def commit(self) -> None:
        """Write the table."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        assert self._file is not None  # at least one tensor was written
        self._file.flush()
        table = Metadata(self._state, self._paths, self._storage, StorageMeta(), _VERSION)
        fresh = self._folder / f"{METADATA}.part"
        fresh.write_bytes(pickle.dumps(table))
        fresh.replace(self._folder / METADATA)


def write_tensor(
    out: DcpWriter,
    path: tuple[str, ...],
    checkpoint: Checkpoint,
    info: TensorInfo,
    progress: Callable[[int], None],
) -> None:
    """Write a tensor block by block.

    Args:
        out: destination.
        path: keys of the nested dictionaries of the tensor; joined by dots they are the name of the item.
        checkpoint, info: the tensor.
        progress: called with the number of bytes of every block.

    Raises:
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: a file cannot be written.
    """
    blocks = list(cut(Box.whole(info.shape), BLOCK_ELEMENTS)) if info.numel else [Box.whole(info.shape)]
    for box in blocks:
        data = torch.empty(0, dtype=torch_dtype(info.dtype))
        if info.numel:
            data = checkpoint.read_box(info, box, verify="off")
        out.tensor(path, info.shape, box, data.view(box.shape))
        progress(data.numel() * data.element_size())
