"""Converts Megatron's sharded tensors to boxes of named global tensors. Pure functions: no I/O, no communication.

A ``ShardedTensor`` has its box and its global tensor (``dist_checkpointing/mapping.py``). This module also assigns optimizer
states to their parameters: ``optimizer.state.exp_avg.<key>`` is the state ``exp_avg`` of ``<key>``. All optimizer wrappers thus
write and read the same tensors.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.transform.convert.megatron.keys import MASTER as MASTER
from unickpt.transform.convert.megatron.keys import WEIGHT as WEIGHT
from unickpt.transform.convert.megatron.keys import key_of as key_of
from unickpt.transform.convert.megatron.keys import tensor_of as tensor_of
from unickpt.transform.convert.pickles.pickle_records import BYTES_IO_KEY


@dataclass
class StateTensor(ShardedTensor):  # type: ignore[misc]
    """A sharded tensor of an optimizer's state, created by ``optimizer.sharded_state_dict``.

    Attributes:
        replicated: every data parallel rank holds the same values, as with an optimizer that is not distributed.
    """

    replicated: bool = False

    def validate_metadata_integrity(self) -> None:
        """Accept a box at any offset. Before 0.15 Megatron requires multiples of the local shape."""
        if len(self.global_shape) != len(self.global_offset) or len(self.local_shape) + self.prepend_axis_num != len(
            self.global_shape
        ):
            raise CheckpointingException(f"{self.key}: box {self.global_offset} {self.local_shape} in {self.global_shape}")


class FoundItem(NamedTuple):
    """A sharded tensor or object of a state dict.

    Attributes:
        item: Megatron's object.
        origin: the model parameter, or other tensor, that it is a part of.
    """

    item: ShardedTensor | ShardedObject
    origin: Any


class LaterTensors(dict[str, ShardedTensor]):
    """Sharded tensors that are described when somebody looks at one of them. A copy or a pickle of it is a plain dict.

    Args:
        describe: returns them by key.
    """

    def __init__(self, describe: Callable[[], Mapping[str, ShardedTensor]]) -> None:
        super().__init__()
        self._describe: Callable[[], Mapping[str, ShardedTensor]] | None = describe

    def _look(self) -> None:
        describe, self._describe = self._describe, None
        if describe is not None:
            super().update(describe())

    def __iter__(self) -> Iterator[str]:
        self._look()
        return super().__iter__()

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._look()
        return super().__contains__(key)

    def __getitem__(self, key: str) -> ShardedTensor:
        self._look()
        return super().__getitem__(key)

    def __eq__(self, other: object) -> bool:
        self._look()
        return super().__eq__(other)

    __hash__ = None

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (dict(self.items()),)

    def keys(self) -> Any:
        self._look()
        return super().keys()

    def values(self) -> Any:
        self._look()
        return super().values()

    def items(self) -> Any:
        self._look()
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        self._look()
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._look()
        return super().pop(key, *default)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def copy(self) -> dict[str, ShardedTensor]:
        return dict(self.items())


def walk(tree: Any, *, later: bool = True) -> list[Any]:
    """Return every leaf of nested dicts and lists. ``later=False``: a ``LaterTensors`` is a leaf."""
    found: list[Any] = []
    _walk([tree], found, later=later)
    return found


def _walk(values: Iterable[Any], found: list[Any], *, later: bool) -> None:
    """Append the leaves. A list takes a third of the time of nested generators, and each save walks several times."""
    for value in values:
        if isinstance(value, dict) and (later or not isinstance(value, LaterTensors)):
            _walk(value.values(), found, later=later)
        elif isinstance(value, list):
            _walk(value, found, later=later)
        else:
            found.append(value)


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with ``function`` applied to every leaf of nested dicts and lists."""
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, function) for value in tree]
    return function(tree)


def sharded(tree: Any) -> Iterator[FoundItem]:
    """Return every sharded tensor and object, with factories built. Does not change the tree."""
    yield from sharded_among(walk(tree))


def sharded_among(leaves: Iterable[Any]) -> Iterator[FoundItem]:
    """Return the sharded tensors and objects among the leaves of a tree, with factories built."""
    for leaf in leaves:
        if isinstance(leaf, (ShardedTensor, ShardedObject)):
            yield FoundItem(leaf, leaf.data)
        elif isinstance(leaf, ShardedTensorFactory):
            for part in walk(leaf.build()):
                if isinstance(part, (ShardedTensor, ShardedObject)):
                    yield FoundItem(part, leaf.data)


def common(tree: Any) -> Any:
    """Return the tree without sharded and local objects, and without the containers that become empty."""
    if isinstance(tree, dict):
        kept = {key: common(value) for key, value in tree.items() if _is_common(value)}
        return {key: value for key, value in kept.items() if not _emptied(tree[key], value)}
    if isinstance(tree, list):
        pairs = [(value, common(value)) for value in tree if _is_common(value)]
        return [value for old, value in pairs if not _emptied(old, value)]
    return tree


def _is_common(value: Any) -> bool:
    return not isinstance(value, (ShardedBase, LocalNonpersistentObject, LaterTensors))


def _emptied(before: Any, after: Any) -> bool:
    return isinstance(before, (dict, list)) and len(before) > 0 and len(after) == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor and its elements on this rank, shaped like the box."""

    box: Box
    data: torch.Tensor


def box_of(item: ShardedTensor) -> Box:
    """Return the box of the local tensor in the global one. Ignores a flattened range."""
    return Box(tuple(item.global_offset), (1,) * item.prepend_axis_num + tuple(item.local_shape))


def pieces_of(item: ShardedTensor, data: torch.Tensor) -> list[Piece]:
    """Return a sharded tensor's elements by box: one box, or for a flattened range at most ``2 * ndim - 1``.

    Args:
        data: local elements, of the local shape, or 1-D if the tensor has a flattened range.
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
    """Whether this rank writes its copy (``mapping.is_main_replica``)."""
    return replica_id == 0 if isinstance(replica_id, int) else all(r == 0 for r in replica_id)


def plain_object(value: Any) -> Any:
    """Return a sharded object's data as plain values. TransformerEngine's extra states are ``BytesIO``, which is opaque."""
    return {BYTES_IO_KEY: value.getvalue()} if type(value) is io.BytesIO else value


def object_of(plain: Any) -> Any:
    """Return the data of ``plain_object`` in its original type."""
    return io.BytesIO(plain[BYTES_IO_KEY]) if isinstance(plain, dict) and plain.keys() == {BYTES_IO_KEY} else plain
