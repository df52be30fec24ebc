"""A checkpoint as ``torch.distributed.checkpoint.load`` reads it: archives of ``torch.save`` end to end, a block at a time.

Weights are under their names, an optimizer's states under ``optim.state.<name>.<state>``, its steps and hyperparameters under
``optim.state.<name>.step`` and ``optim.param_groups.<name>.<key>``, as ``get_state_dict`` with ``flatten_optimizer_state_dict``
names them (torch/distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from unickpt import objects
from unickpt.errors import MismatchError
from unickpt.exporting import Exported
from unickpt.exporting.distcp import Writer, write_tensor
from unickpt.foreign.distcp import METADATA
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint

OPTIMIZER = "optim"


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
    with Writer(folder, shard_bytes) as out:
        for info in infos:
            write_tensor(out, path_of(info), checkpoint, info, verify=verify, progress=progress)
        for path, value in _of_optimizer(checkpoint, infos):
            if isinstance(value, torch.Tensor):
                out.tensor(path, (), Box((), ()), value)
            else:
                out.object(path, value)
        for alias, name in checkpoint.manifest.aliases.items():
            out.alias((alias,), name)
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
