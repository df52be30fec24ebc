"""A checkpoint as ``torch.distributed.checkpoint.load`` reads it: archives of ``torch.save`` end to end, a block at a time.

Weights are under their names, an optimizer's states under ``optim.state.<name>.<state>``, its steps and hyperparameters under
``optim.state.<name>.step`` and ``optim.param_groups.<name>.<key>``, as ``get_state_dict`` with ``flatten_optimizer_state_dict``
names them (torch/distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unickpt import objects
from unickpt.dtypes import torch_dtype
from unickpt.errors import MismatchError
from unickpt.exporting import Exported
from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint

METADATA, OPTIMIZER = ".metadata", "optim"
BLOCK_ELEMENTS = 8 << 20  # of a tensor that are in memory, and in one archive
_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION


def export_dcp(
    checkpoint: Checkpoint, folder: Path, *, shard_bytes: int = 5 << 30, verify: str = "off",
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Write a folder that ``torch.distributed.checkpoint.load`` reads, with weights, masters and states.

    Args:
        checkpoint: of whatever framework; names stay as they are.
        folder: that is made; none of its kind is in it yet.
        shard_bytes: of a file, at most, but for a single block.
        verify, progress: as of ``exporting.export``.

    Raises:
        MismatchError: the folder holds such a checkpoint, or this one no weights.
        CorruptCheckpointError, StorageError: damaged or unreadable.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / METADATA).exists():
        raise MismatchError(f"{folder}: holds a checkpoint of torch.distributed.checkpoint already; name another folder")
    infos = [info for info in checkpoint.index.tensors if info.kind != "object"]
    if not infos:
        raise MismatchError(f"{checkpoint.storage}: has no weights")
    with _Writer(folder, shard_bytes) as out:
        for info in infos:
            blocks = list(cut(Box.whole(info.shape), BLOCK_ELEMENTS)) if info.numel else [Box.whole(info.shape)]
            for box in blocks:
                data = torch.empty(0, dtype=torch_dtype(info.dtype))
                if info.numel:
                    data = checkpoint.read_box(info, box, verify=verify)
                out.tensor(path_of(info), info.shape, box, data.view(box.shape))
                progress(data.numel() * data.element_size())
        for path, value in _of_optimizer(checkpoint, infos):
            if isinstance(value, torch.Tensor):
                out.tensor(path, (), Box((), ()), value)
            else:
                out.object(path, value)
        for alias, name in checkpoint.manifest.aliases.items():
            out.alias(alias, name)
        out.commit()
    return Exported(tuple(out.names), len(infos), sum(info.size_bytes for info in infos), (), without_config=False)


def path_of(info: TensorInfo) -> tuple[str, ...]:
    """The keys of the nested dictionaries that a tensor is in; joined by dots, the name of the item."""
    return (info.name,) if info.state == "weight" else (OPTIMIZER, f"state.{info.name}.{info.state}")


def _of_optimizer(checkpoint: Checkpoint, infos: list[TensorInfo]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Steps as 0-d tensors, as torch's optimizers have them; hyperparameters as objects."""
    record = checkpoint.manifest.optimizer
    if record is None:
        return
    known = {info.name for info in infos}
    for what, groups in (("state", record.scalars), ("param_groups", record.groups)):
        for group in groups:
            values = objects.decode(group.hyperparameters, tensors={}, where=f"optimizer {what}").value
            for name in group.parameters:
                for key, value in values.items() if name in known else ():
                    single = what == "state" and isinstance(value, (int, float)) and not isinstance(value, bool)
                    made = torch.tensor(float(value), dtype=torch.float32) if single else value
                    yield (OPTIMIZER, f"{what}.{name}.{key}"), made


class _Writer:
    """The files, and the table of what is where, which is written last: without it there is no checkpoint."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self.names: list[str] = []
        self._file: BinaryIO | None = None
        self._state: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def __enter__(self) -> _Writer:
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

    def alias(self, alias: str, name: str) -> None:
        """A further name of a weight: the same bytes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        if name in self._state and alias not in self._state:
            self._state[self._key((alias,))] = entry = self._state[name]
            for chunk in entry.chunks:
                self._storage[MetadataIndex(alias, chunk.offsets)] = self._storage[MetadataIndex(name, chunk.offsets)]

    def commit(self) -> None:
        """The table."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        assert self._file is not None  # something was written
        self._file.flush()
        table = Metadata(self._state, self._paths, self._storage, StorageMeta(checkpoint_id=str(self._folder)), _VERSION)
        fresh = self._folder / f"{METADATA}.part"
        fresh.write_bytes(pickle.dumps(table))
        fresh.replace(self._folder / METADATA)
