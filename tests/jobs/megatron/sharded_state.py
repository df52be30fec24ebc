"""Small sharded state dicts for the scenarios of ``dist_checkpointing``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_sharded_strategy,
)


def strategy() -> Any:
    return get_default_save_sharded_strategy("unickpt")


def made(folder: Path) -> str:
    """Create an empty directory, which Megatron requires before it saves, and return its path."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return str(folder)


def halves(key: str, tensor: torch.Tensor, **options: Any) -> ShardedTensor:
    """Return this rank's rows of a global tensor as a sharded tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = tensor.chunk(world)[rank].clone()
    return ShardedTensor.from_rank_offsets(key, part, (0, rank, world), **options)


def shards_begin_anywhere() -> bool:
    """Whether this Megatron supports uneven shards. Before 0.15 a shard begins at a multiple of its own size."""
    try:
        ShardedTensor("x", torch.zeros(2), torch.float32, (2,), (3,), (1,), None)
    except CheckpointingException:
        return False
    return True
