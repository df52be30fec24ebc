"""Mapping of a state dict to tensors of a checkpoint. Pure functions without I/O and communication."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from unickpt.base.errors import ConfigError
from unickpt.checkpoint.coordination.owners import Owner, Owners
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.read_plan import share_of_replicas
from unickpt.checkpoint.save.shards import Shard, shards_of_flat_range

WEIGHT, MASTER = "weight", "master"
Key: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of a global tensor that this rank holds.

    Example:
        Rank 1 of 2 holds the lower half of an 8 x 4 weight::

            LocalShard(torch.zeros(4, 4), start=(4, 0), global_shape=(8, 4))

    Attributes:
        data: elements of the box. Its shape is the shape of the box. Any device, dtype and strides.
        start: position of the box in the global tensor, in elements per dimension.
        global_shape: shape of the global tensor, in elements per dimension.
    """

    data: torch.Tensor
    start: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the box lies in the tensor.

        Raises:
            ConfigError: the dimensions differ in number, or the box leaves the global tensor.
        """
        shape = tuple(self.data.shape)
        object.__setattr__(self, "start", tuple(self.start))
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
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


def as_shard(key: Any, value: Any) -> LocalShard:
    """Return a value of a state dict as a shard; a plain tensor is a shard that holds the whole tensor.

    Raises:
        ConfigError: the value is not a tensor or a shard, or is a DTensor.
    """
    if isinstance(value, LocalShard):
        return value
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{key!r}: expected a torch.Tensor or a LocalShard, got {type(value).__name__}")
    if hasattr(value, "device_mesh"):
        raise ConfigError(f"{key!r}: is a DTensor; pass LocalShard(value.to_local(), start, value.shape) instead")
    return LocalShard(value, (0,) * value.ndim, tuple(value.shape))


def _info(key: Any, shard: LocalShard) -> TensorInfo:
    name, state = key_of(key)
    kind = "parameter" if state in (WEIGHT, MASTER) else "optimizer"
    return TensorInfo(name, state, name_of(shard.data.dtype), shard.global_shape, kind)


def shards_to_save(state: Mapping[Key, Value], *, rank: int, world: int) -> tuple[list[Shard], list[TensorInfo]]:
    """Return the shards that one rank writes.

    A ``LocalShard`` is written by the rank that passes it. A plain tensor is the same on all ranks, and each rank writes
    an equal part of it.

    Args:
        state: tensors and shards by name or (name, state).
        rank: this rank.
        world: number of ranks.

    Returns:
        Shards that this rank writes, and descriptions of all tensors of the state.

    Raises:
        ConfigError: a key or value has the wrong type.
        FormatError: a dtype cannot be stored.
    """
    shards, tensors = list[Shard](), list[TensorInfo]()
    replicated = list[tuple[TensorInfo, torch.Tensor]]()
    for key, value in state.items():
        shard = as_shard(key, value)
        info = _info(key, shard)
        tensors.append(info)
        if not isinstance(value, LocalShard):
            replicated.append((info, shard.data))
        elif shard.box.numel:
            shards.append(Shard(info, shard.box, shard.data))
    replicated.sort(key=lambda pair: pair[0].key)  # the order of the state dict can differ between ranks
    ranges = share_of_replicas(
        [info.size_bytes for info, _ in replicated], [info.numel for info, _ in replicated], rank=rank, world=world
    )
    for (info, data), (lo, hi) in zip(replicated, ranges, strict=True):
        shards += shards_of_flat_range(info, lo, hi, data.detach().reshape(-1)[lo:hi])
    return shards, tensors


def fingerprint_of_replicated(state: Mapping[Key, Value]) -> str:
    """Return a digest of the names, shapes and dtypes of all plain tensors. It must be equal on all ranks."""
    found = sorted(
        (key_of(key), tuple(value.shape), str(value.dtype)) for key, value in state.items() if isinstance(value, torch.Tensor)
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
            tensors = {key_of(key): value.data if isinstance(value, LocalShard) else value for key, value in state.items()}
            place = tensors[min(tensors)].untyped_storage()
        except Exception:
            return None
        if place not in self._known:
            self._known[place] = self.owners.add(f"a state dict of {len(state):,} tensors")
        found: Owner = self._known[place]
        return found
