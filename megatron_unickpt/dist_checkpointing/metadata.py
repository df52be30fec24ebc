"""The contents of a unickpt checkpoint in the form of ``dist_checkpointing``: common state, keys, shapes, removal of tensors.

Reads no tensor and needs no process group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_unickpt.dist_checkpointing import restore
from megatron_unickpt.framework import internals
from megatron_unickpt.framework.errors import as_megatron_errors
from megatron_unickpt.held_state import foreign_state, sharded_tensors
from megatron_unickpt.held_state.foreign_state import Receiver
from megatron_unickpt.held_state.optimizer import METADATA
from megatron_unickpt.runtime import Runtime
from unickpt.base.logs import logger
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.megatron.keys import CONTENT_METADATA
from unickpt.transform.edit.remove_tensors import remove_tensors


def common_state_dict(checkpoint: Checkpoint, receiver: Receiver | None = None) -> Any:
    """Return Megatron's common state dict, without tensors.

    Args:
        checkpoint: checkpoint of any framework.
        receiver: objects of the job that loads a checkpoint of another framework.
    """
    if foreign_state.is_foreign(checkpoint):
        state: Any = foreign_state.common_state(checkpoint, receiver or Receiver())[0]
    else:
        state = restore.Restore(checkpoint, allow_pickle=internals.options().allow_pickle).common()
    if isinstance(state, dict):
        if checkpoint.manifest.optimizer is not None:  # the optimizers were saved in model space
            state[CONTENT_METADATA] = {**(state.get(CONTENT_METADATA) or {}), **METADATA}
        state.setdefault("optimizer", {})  # 0.12 expects the key
    return state


def without_data(key: str, info: TensorInfo) -> ShardedTensor:
    """Return a stored tensor as Megatron describes one: a single shard without data."""
    shape = tuple(info.shape)
    return ShardedTensor(key, None, torch_dtype(info.dtype), shape, shape, (0,) * len(shape), (1,) * len(shape))


def tensors_of(checkpoint: Checkpoint) -> dict[str, ShardedTensor]:
    """Return every tensor by key, with its global shape and dtype and without data."""
    found = {}
    for info in restore.stored_tensors(checkpoint):
        key = sharded_tensors.key_of(info.name, info.state)
        found[key] = without_data(key, info)
    return found


def sharded_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return every tensor without data and every sharded object, by key."""
    found: dict[str, Any] = dict(tensors_of(checkpoint))
    for key in checkpoint.shared_names():
        item = ShardedObject.empty_from_unique_key(key)
        found[item.unique_key] = item
    return found


def load_common_state_dict(runtime: Runtime, checkpoint_dir: str | Path) -> Any:
    """Replace ``dist_checkpointing.load_common_state_dict``. See ``common_of``."""
    with as_megatron_errors():
        return common_state_dict(runtime.opened(checkpoint_dir), runtime.call.receiver)


def load_tensors_metadata(runtime: Runtime, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """Replace ``dist_checkpointing.load_tensors_metadata``. See ``tensors_of``."""
    with as_megatron_errors():
        return tensors_of(runtime.opened(checkpoint_dir))


def load_sharded_metadata(runtime: Runtime, checkpoint_dir: str | Path) -> dict[str, Any]:
    """Replace ``dist_checkpointing.load_sharded_metadata``. See ``sharded_of``."""
    with as_megatron_errors():
        return sharded_of(runtime.opened(checkpoint_dir))


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove all tensors whose key begins with a prefix from the index, in one atomic step.

    Their bytes stay in the data files until the checkpoint is deleted. Megatron calls this on one rank.
    """
    with as_megatron_errors():
        names = remove_tensors(
            str(checkpoint_dir), lambda name, state: sharded_tensors.key_of(name, state).startswith(key_prefix)
        )
    logger.info("unickpt: removed %d tensors of %s* from %s", len(names), key_prefix, checkpoint_dir)
