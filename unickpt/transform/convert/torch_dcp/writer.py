"""Export to ``torch.distributed.checkpoint``, block by block.

A weight keeps its name. Optimizer states are ``optim.state.<name>.<state>``, steps ``optim.state.<name>.step`` and
hyperparameters ``optim.param_groups.<name>.<key>``, as in ``get_state_dict`` with ``flatten_optimizer_state_dict``
(torch/distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.optimizer_record import decoded
from unickpt.transform.convert.exported import Exported
from unickpt.transform.convert.torch_dcp.files import METADATA
from unickpt.transform.convert.torch_dcp.files_writer import DcpWriter, write_tensor

OPTIMIZER = "optim"


def export_dcp(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    shard_bytes: int = 5 << 30,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads, with weights, masters and states.

    Args:
        checkpoint: checkpoint of any framework. Names do not change.
        folder: output directory. It must not contain a DCP checkpoint.
        shard_bytes: maximum size of a file, unless a single block is larger.
        progress: called with the number of bytes written.

    Raises:
        MismatchError: the folder contains a DCP checkpoint, or the checkpoint has no weights.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / METADATA).exists():
        raise MismatchError(f"{folder}: already contains a checkpoint of torch.distributed.checkpoint; choose another folder")
    infos = [info for info in checkpoint.index.tensors if info.kind != "object"]
    if not infos:
        raise MismatchError(f"{checkpoint.storage}: has no weights")
    with DcpWriter(folder, shard_bytes) as out:
        for info in infos:
            write_tensor(out, path_of(info), checkpoint, info, progress)
        for path, value in _of_optimizer(checkpoint, infos):
            if isinstance(value, torch.Tensor):
                out.tensor(path, (), Box((), ()), value)
            else:
                out.object(path, value)
        for alias, name in checkpoint.manifest.aliases.items():
            out.alias((alias,), name)
        out.commit()
    return Exported(folder, len(infos), sum(info.size_bytes for info in infos), tuple(out.names))


def path_of(info: TensorInfo) -> tuple[str, ...]:
    """Return the keys of the nested dictionaries of a tensor; joined by dots they are the name of the item."""
    return (info.name,) if info.state == "weight" else (OPTIMIZER, f"state.{info.name}.{info.state}")


def _of_optimizer(checkpoint: Checkpoint, infos: list[TensorInfo]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield steps as 0-d tensors, as in torch's optimizers, and hyperparameters as objects."""
    record = checkpoint.manifest.optimizer
    if record is None:
        return
    known = {info.name for info in infos}
    for what, groups in (("state", record.scalars), ("param_groups", record.groups)):
        for group in groups:
            values = decoded(group, where=f"optimizer {what}")
            for name in group.parameters:
                for key, value in values.items() if name in known else ():
                    single = what == "state" and isinstance(value, (int, float)) and not isinstance(value, bool)
                    made = torch.tensor(float(value), dtype=torch.float32) if single else value
                    yield (OPTIMIZER, f"{what}.{name}.{key}"), made
