"""Megatron's sharded tensors as boxes of named global tensors. Pure functions: no I/O, no communication.

A ``ShardedTensor`` already says which box of which global tensor it is (``dist_checkpointing/
mapping.py``). What is added here: optimizer states are known by the parameter they belong to
(``optimizer.state.exp_avg.<key>`` is the state ``exp_avg`` of ``<key>``), so that every optimizer
wrapper writes and reads the same tensors.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from unickpt.fragments import Box, split_flat_range
from unickpt.megatron_keys import BYTES_IO
from unickpt.megatron_keys import MASTER as MASTER
from unickpt.megatron_keys import WEIGHT as WEIGHT
from unickpt.megatron_keys import key_of as key_of
from unickpt.megatron_keys import tensor_of as tensor_of


@dataclass
class StateTensor(ShardedTensor):  # type: ignore[misc]
    """A sharded tensor of an optimizer's state, made by ``optimizer.sharded_state_dict``.

    Attributes:
        replicated: whether every data parallel rank holds the same, as with an optimizer that is not distributed.
    """

    replicated: bool = False

    def validate_metadata_integrity(self) -> None:
        """A box may lie anywhere. Before 0.15 Megatron wants offsets to be multiples of the local shape."""
        if len(self.global_shape) != len(self.global_offset) or len(self.local_shape) + self.prepend_axis_num != len(
            self.global_shape
        ):
            raise CheckpointingException(f"{self.key}: box {self.global_offset} {self.local_shape} in {self.global_shape}")


@dataclass(frozen=True, slots=True)
class Found:
    """A sharded tensor or object of a state dict.

    Attributes:
        item: as Megatron describes it.
        origin: the model parameter (or other tensor) that it is all or part of.
    """

    item: ShardedTensor | ShardedObject
    origin: Any


def walk(tree: Any) -> Iterator[Any]:
    """Every leaf of nested dicts and lists."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from walk(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from walk(value)
    else:
        yield tree


def sharded(tree: Any) -> Iterator[Found]:
    """Every sharded tensor and object, factories built. The tree is not changed."""
    for leaf in walk(tree):
        if isinstance(leaf, ShardedTensorFactory):
            for part in walk(leaf.build()):
                if isinstance(part, (ShardedTensor, ShardedObject)):
                    yield Found(part, leaf.data)
        elif isinstance(leaf, (ShardedTensor, ShardedObject)):
            yield Found(leaf, leaf.data)


def common(tree: Any) -> Any:
    """The tree without sharded and local objects, and without the containers that this empties."""
    if isinstance(tree, dict):
        kept = {key: common(value) for key, value in tree.items() if _is_common(value)}
        return {key: value for key, value in kept.items() if not _emptied(tree[key], value)}
    if isinstance(tree, list):
        pairs = [(value, common(value)) for value in tree if _is_common(value)]
        return [value for old, value in pairs if not _emptied(old, value)]
    return tree


def _is_common(value: Any) -> bool:
    return not isinstance(value, (ShardedBase, LocalNonpersistentObject))


def _emptied(before: Any, after: Any) -> bool:
    return isinstance(before, (dict, list)) and len(before) > 0 and len(after) == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor and its elements on this rank, shaped like the box."""

    box: Box
    data: torch.Tensor


def box_of(item: ShardedTensor) -> Box:
    """The box of the local tensor (all of it, if it is flattened) in the global one."""
    return Box(tuple(item.global_offset), (1,) * item.prepend_axis_num + tuple(item.local_shape))


def pieces_of(item: ShardedTensor, data: torch.Tensor) -> list[Piece]:
    """A sharded tensor's elements by box: one, or for a flattened range at most ``2 * ndim - 1``.

    Args:
        data: the local elements; of the local shape, or flat if the tensor has a flattened range.
    """
    whole = box_of(item)
    if item.flattened_range is None:
        return [Piece(whole, data.reshape(whole.shape) if data.is_contiguous() else data[(None,) * item.prepend_axis_num])]
    found, at = [], 0
    for box in split_flat_range(whole.shape, item.flattened_range.start, item.flattened_range.stop):
        start = tuple(a + b for a, b in zip(whole.start, box.start, strict=True))
        found.append(Piece(Box(start, box.shape), data.narrow(0, at, box.numel).view(box.shape)))
        at += box.numel
    return found


def is_main(replica_id: int | tuple[int, ...]) -> bool:
    """Whether this copy is the one that is written (``mapping.is_main_replica``)."""
    return replica_id == 0 if isinstance(replica_id, int) else all(r == 0 for r in replica_id)


def plain_object(value: Any) -> Any:
    """A sharded object's data in plain values: TransformerEngine's extra states are ``BytesIO``, which would be opaque."""
    return {BYTES_IO: value.getvalue()} if type(value) is io.BytesIO else value


def object_of(plain: Any) -> Any:
    """Inverse of ``plain_object``."""
    return io.BytesIO(plain[BYTES_IO]) if isinstance(plain, dict) and plain.keys() == {BYTES_IO} else plain
