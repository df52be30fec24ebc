"""Looking at a unickpt checkpoint through ``dist_checkpointing``: common state, keys and shapes, removal.

No tensor is read, and no process group is needed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_unickpt import crossing, mapping, restore
from megatron_unickpt.job import CONTENT_METADATA, in_megatrons_terms
from megatron_unickpt.optimizer import METADATA
from unickpt.dtypes import torch_dtype
from unickpt.editing import remove_tensors
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint

logger = logging.getLogger("unickpt")


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Megatron's common state dict, without tensors. Needs no process group."""
    with in_megatrons_terms():
        work = restore.Restore(Checkpoint.open(str(checkpoint_dir)))
        foreign = crossing.is_foreign(work.checkpoint)
        state = crossing.common_state(work.checkpoint)[0] if foreign else work.common()
    if isinstance(state, dict):
        if work.checkpoint.manifest.optimizer is not None:  # optimizers have described themselves our way
            state[CONTENT_METADATA] = {**(state.get(CONTENT_METADATA) or {}), **METADATA}
        state.setdefault("optimizer", {})  # 0.12 looks into it
    return state


def without_data(key: str, info: TensorInfo) -> ShardedTensor:
    """A stored tensor as Megatron describes it: one shard, no data."""
    shape = tuple(info.shape)
    return ShardedTensor(key, None, torch_dtype(info.dtype), shape, shape, (0,) * len(shape), (1,) * len(shape))


def tensors_of(checkpoint: Checkpoint) -> dict[str, ShardedTensor]:
    """key -> tensor without data."""
    found = {}
    for info in restore.stored_tensors(checkpoint):
        key = mapping.key_of(info.name, info.state)
        found[key] = without_data(key, info)
    return found


def of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything sharded, by key: tensors without data, and objects."""
    found: dict[str, Any] = dict(tensors_of(checkpoint))
    for key in checkpoint.shared_names():
        item = ShardedObject.empty_from_unique_key(key)
        found[item.unique_key] = item
    return found


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """key -> ``ShardedTensor`` without data: every tensor's global shape and dtype."""
    with in_megatrons_terms():
        return tensors_of(Checkpoint.open(str(checkpoint_dir)))


def load_sharded_metadata(checkpoint_dir: str | Path) -> dict[str, Any]:
    """As ``load_tensors_metadata``, and the sharded objects."""
    with in_megatrons_terms():
        return of_checkpoint(Checkpoint.open(str(checkpoint_dir)))


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove all tensors whose key begins with a prefix: from the index, at once or not at all.

    The bytes stay in the data files until the checkpoint is deleted; Megatron calls this on one rank.
    """
    with in_megatrons_terms():
        names = remove_tensors(str(checkpoint_dir), lambda name, state: mapping.key_of(name, state).startswith(key_prefix))
    logger.info("unickpt: removed %d tensors of %s* from %s", len(names), key_prefix, checkpoint_dir)
