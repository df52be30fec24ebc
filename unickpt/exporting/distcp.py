"""The files of ``torch.distributed.checkpoint``, written one block after the other; what reads them: ``foreign/distcp.py``.

A tensor's blocks are archives of ``torch.save`` end to end (torch/distributed/checkpoint/filesystem.py, ``_write_item``).
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unickpt.dtypes import torch_dtype
from unickpt.foreign.distcp import METADATA
from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint

BLOCK_ELEMENTS = 8 << 20  # of a tensor that are in memory, and in one archive
_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION


class Writer:
    """The files, and the table of what is where, which is written last: without it there is no checkpoint.

    Attributes:
        names: of the files that were begun.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self.names: list[str] = []
        self._file: BinaryIO | None = None
        self._state: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def _key(self, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        self._paths[key] = path
        return key

    def _place(self, data: Any) -> Any:
        """Where an archive with this was written."""
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
        """A box of a tensor; a tensor's boxes cover it."""
        from torch.distributed.checkpoint import metadata as made

        key = self._key(path)
        entry = self._state.setdefault(
            key, made.TensorStorageMetadata(made.TensorProperties(dtype=data.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(made.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)))
        self._storage[made.MetadataIndex(key, box.start, len(entry.chunks) - 1)] = self._place(data)

    def object(self, path: tuple[str, ...], value: Any) -> None:
        """Anything that can be pickled."""
        from torch.distributed.checkpoint import metadata as made

        key = self._key(path)
        self._state[key] = made.BytesStorageMetadata()
        self._storage[made.MetadataIndex(key)] = self._place(value)

    def alias(self, path: tuple[str, ...], key: str) -> None:
        """A further name of a tensor that was written: the same bytes. Nothing where there is no such tensor."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        alias = ".".join(path)
        if key in self._state and alias not in self._state:
            entry = self._state[key]
            self._state[self._key(path)] = dataclasses.replace(entry, chunks=list(entry.chunks))
            for chunk in entry.chunks:
                self._storage[MetadataIndex(alias, chunk.offsets)] = self._storage[MetadataIndex(key, chunk.offsets)]

    def commit(self) -> None:
        """The table."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        assert self._file is not None  # something was written
        self._file.flush()
        table = Metadata(self._state, self._paths, self._storage, StorageMeta(), _VERSION)
        fresh = self._folder / f"{METADATA}.part"
        fresh.write_bytes(pickle.dumps(table))
        fresh.replace(self._folder / METADATA)


def write_tensor(
    out: Writer, path: tuple[str, ...], checkpoint: Checkpoint, info: TensorInfo, *, verify: str,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """All of a tensor, a block at a time.

    Args:
        out: where it goes.
        path: the keys of the nested dictionaries that it is in; joined by dots, the name of the item.
        checkpoint, info: the tensor.
        verify: as of ``Checkpoint.read_box``.
        progress: called with the bytes of every block.

    Raises:
        CorruptCheckpointError, StorageError: damaged or unreadable.
        OSError: it cannot be written.
    """
    blocks = list(cut(Box.whole(info.shape), BLOCK_ELEMENTS)) if info.numel else [Box.whole(info.shape)]
    for box in blocks:
        data = torch.empty(0, dtype=torch_dtype(info.dtype))
        if info.numel:
            data = checkpoint.read_box(info, box, verify=verify)
        out.tensor(path, info.shape, box, data.view(box.shape))
        progress(data.numel() * data.element_size())
