"""Mapping of a state dict to tensors of a checkpoint. Pure functions without I/O and communication."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from unickpt.api.dtensors import is_dtensor, local_tensor, placed_tensor
from unickpt.api.group import Group
from unickpt.api.holders import Holders
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.coordination.owners import Owner, Owners
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.state.filling import MASTER, WEIGHT
from unickpt.checkpoint.state.held import Copies, Description, Held

Key: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of a global tensor that this rank holds.

    Example:
        Rank 1 of 2 holds the lower half of an 8 x 4 weight::

            LocalShard(torch.zeros(4, 4), start=(4, 0), global_shape=(8, 4))

        Ranks 1 and 3 of 4 hold it, as with HSDP::

            LocalShard(torch.zeros(4, 4), start=(4, 0), global_shape=(8, 4), copies=(1, 3))

    Attributes:
        data: elements of the box. Its shape is the shape of the box. Any device, dtype and strides.
        start: position of the box in the global tensor, in elements per dimension.
        global_shape: shape of the global tensor, in elements per dimension.
        copies: ranks of the group that pass the same box with the same values, this rank included. Each of them writes an equal
            part; the values are not compared. Ranks with the same ``copies`` pass the same boxes. Empty: this rank alone.
    """

    data: torch.Tensor
    start: tuple[int, ...]
    global_shape: tuple[int, ...]
    copies: tuple[int, ...] | range = ()

    def __post_init__(self) -> None:
        """Check that the box lies in the tensor.

        Raises:
            ConfigError: the dimensions differ in number, or the box leaves the global tensor.
        """
        shape = tuple(self.data.shape)
        object.__setattr__(self, "start", tuple(self.start))
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
        if not isinstance(self.copies, range):  # of all ranks: sorted, and as cheap for thousands of them
            object.__setattr__(self, "copies", tuple(sorted(self.copies)))
        if not len(shape) == len(self.start) == len(self.global_shape):
            raise ConfigError(
                f"LocalShard: data has {len(shape)} dimensions, start has {len(self.start)} and global_shape has "
                f"{len(self.global_shape)}; expected the same number"
            )
        for dim, (first, length, extent) in enumerate(zip(self.start, shape, self.global_shape, strict=True)):
            if first < 0 or first + length > extent:
                raise ConfigError(
                    f"LocalShard: the box [{first}, {first + length}) leaves dimension {dim} of the global shape "
                    f"{self.global_shape}"
                )

    @property
    def box(self) -> Box:
        """Region of the global tensor."""
        return Box(self.start, tuple(self.data.shape))


Value: TypeAlias = torch.Tensor | LocalShard


def key_of(key: Any) -> tuple[str, str]:
    """Return (name, state) of a key of a state dict.

    Raises:
        ConfigError: the key is neither a name nor a (name, state) pair.
    """
    if isinstance(key, str):
        return key, WEIGHT
    if isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) and part for part in key):
        return key[0], key[1]
    raise ConfigError(f"key {key!r} of the state dict: expected a name or a (name, state) pair of strings")


def as_shards(key: Any, value: Any, group: Group) -> list[LocalShard]:
    """Return what this rank holds of a value of a state dict, possibly one empty shard; an empty list if it holds nothing.

    A plain tensor is a shard that holds the whole tensor, and every rank of the group has a copy. A DTensor may have several
    shards, which are views of its local tensor.

    Raises:
        ConfigError: the value is not a tensor or a shard, or is a DTensor with a placement that is not supported.
    """
    if isinstance(value, LocalShard):
        if value.copies and (group.rank not in value.copies or value.copies[-1] >= len(group.ranks)):
            raise ConfigError(
                f"{key!r}: LocalShard has copies={value.copies} on rank {group.rank} of {len(group.ranks)}; expected ranks of "
                "the group, this one among them"
            )
        return [value]
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{key!r}: expected a torch.Tensor, a DTensor or a LocalShard, got {type(value).__name__}")
    if not is_dtensor(value):
        return [LocalShard(value, (0,) * value.ndim, tuple(value.shape), range(len(group.ranks)))]
    local = local_tensor(value)
    part = placed_tensor(key, value, local.shape)
    if part is None:
        return []
    ranks, shape = group.among(part.ranks), tuple(value.shape)
    if len(part.boxes) == 1:
        return [LocalShard(local, part.boxes[0][0].start, shape, ranks)]
    return [LocalShard(local[region.slices()], box.start, shape, ranks) for box, region in part.boxes]


def _local(value: Any) -> torch.Tensor:
    """Return the tensor of this rank of a DTensor or a shard; another tensor as it is."""
    return value.data if isinstance(value, LocalShard) else local_tensor(value)


def describe(state: Mapping[Key, Value], group: Group, holders: Holders) -> Description:
    """Return what this rank holds of a state dict. ``holders``: which meshes of DTensors hold the same.

    Raises:
        ConfigError: a key or value has the wrong type.
        FormatError: a dtype cannot be stored.
    """
    found = Description()
    for key, value in state.items():
        shards = as_shards(key, value, group)
        if not shards:
            continue
        name, part = key_of(key)
        kind = "parameter" if part in (WEIGHT, MASTER) else "optimizer"
        info = TensorInfo(name, part, name_of(shards[0].data.dtype, f"{name} ({part})"), shards[0].global_shape, kind)
        found.tensors.append(info)
        for shard in shards:
            if not shard.box.numel:
                continue
            copies = holders.copies(value, tuple(shard.copies), group) if is_dtensor(value) else shard.copies
            found.held.append(Held(info, shard.box, shard.data.detach(), Copies(copies, group.rank) if copies else None))
    return found


def fingerprint_of_replicated(state: Mapping[Key, Value]) -> str:
    """Return a digest of the names, shapes and dtypes of all plain tensors. It must be equal on all ranks."""
    found = sorted(
        (key_of(key), tuple(value.shape), str(value.dtype))
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not is_dtensor(value)
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


class Models:
    """The models of the state dicts of a process. A model is known by the memory of its first tensor.

    A state dict of copies is a model of its own, which ends with the copies.
    """

    def __init__(self) -> None:
        self.owners = Owners()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, state: Mapping[Key, Value]) -> Owner | None:
        """Return the owner of a state dict; None if it has no tensors, or keys or values that the save refuses."""
        try:
            tensors = {key_of(key): _local(value) for key, value in state.items()}
            place = tensors[min(tensors)].untyped_storage()
        except Exception:
            return None
        if place not in self._known:
            self._known[place] = self.owners.add(f"a state dict of {len(state):,} tensors")
        found: Owner = self._known[place]
        return found
