"""From a module and its optimizers to what this rank holds of them (``Description``). Calls no collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_unickpt.held_state.names import Names
from torch_unickpt.held_state.optimizers import Optimizers
from unickpt.api.dtensors import is_dtensor
from unickpt.api.group import Group
from unickpt.api.holders import Holders
from unickpt.api.state import Key, LocalShard, Value, as_shards, key_of
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.state.filling import WEIGHT
from unickpt.checkpoint.state.held import Copies, Description, Held

_SMALL_BYTES = 1 << 20  # of a tensor that the first rank writes whole


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of this rank.

    Attributes:
        key: (name, state) in the checkpoint.
        value: a plain tensor, a DTensor, or a ``LocalShard``.
        kind: as in ``TensorInfo``.
        divided: ranks that hold the same plain tensor write equal parts of it. False: one of them writes it, because nothing
            says that their values are equal.
    """

    key: tuple[str, str]
    value: Value
    kind: str
    divided: bool = True

    @property
    def plain(self) -> bool:
        """Whether every rank that holds it has the whole tensor."""
        return not isinstance(self.value, LocalShard) and not is_dtensor(self.value)

    @property
    def text(self) -> str:
        """What ranks with the same plain tensor have in common."""
        assert isinstance(self.value, torch.Tensor)
        return f"{self.key}{tuple(self.value.shape)}{self.value.dtype}"


def items_of(names: Names, optimizers: Optimizers, group: Group) -> list[Item]:
    """Return the parameters, the persistent buffers, and the states of the optimizers.

    Parameters in fp32 are their own masters.
    """
    states: dict[Key, Value] = optimizers.tensors(group)
    return [
        *(Item((name, WEIGHT), parameter, "parameter") for name, parameter in names.parameters.items()),
        *buffers_of(names),
        *(Item(key_of(key), value, "optimizer") for key, value in states.items()),
    ]


def buffers_of(names: Names) -> list[Item]:
    """Return the persistent buffers."""
    return [Item((name, WEIGHT), buffer, "buffer", divided=False) for name, buffer in names.buffers.items()]


def description(items: Iterable[Item], holders: Holders, group: Group, *, steady: bool = False) -> Description:
    """Return what this rank holds.

    Args:
        items: of this rank.
        holders: ranks of the group that have a plain tensor, by ``Item.text``.
        group: the ranks.
        steady: parameters and states of the optimizer change only in its steps.

    Raises:
        ConfigError: a DTensor has a placement that is not supported, or a tensor has no memory (``meta``) or is not dense.
        FormatError: a dtype cannot be stored.
    """
    found = Description()
    written = [0] * max(len(group.ranks), 1)  # bytes of whole tensors by rank
    for item in sorted(items, key=lambda each: each.key):
        shards = as_shards(item.key, item.value, group)
        if not shards:
            continue
        data = shards[0].data
        if data.is_meta:
            raise ConfigError(f"{item.key[0]} ({item.key[1]}): is on the meta device, so it has no values to save")
        if data.layout != torch.strided:
            kind = str(data.layout).removeprefix("torch.")
            raise ConfigError(
                f"{item.key[0]} ({item.key[1]}): has the layout {kind}, which is not supported. Use a dense tensor"
            )
        info = TensorInfo(*item.key, name_of(data.dtype, f"{item.key[0]} ({item.key[1]})"), shards[0].global_shape, item.kind)
        found.tensors.append(info)
        if not item.plain:
            ranks = tuple(shards[0].copies)
            ranks = holders.copies(item.value, ranks, group) if is_dtensor(item.value) else ranks
            copies = Copies(ranks, group.rank) if ranks else None
        elif item.divided:
            copies = Copies(holders.of(item.text), group.rank)
        else:
            copies = Copies((_writer(item, holders, written, data.numel() * data.element_size()),), group.rank)
        steady_here = steady and item.kind != "buffer"
        found.held += [
            Held(info, each.box, each.data.detach(), copies, steady=steady_here) for each in shards if each.box.numel
        ]
    return found


def _writer(item: Item, holders: Holders, written: list[int], size_bytes: int) -> int:
    """Return the rank that writes a whole tensor: the same on all ranks that hold it, as they go through the same tensors."""
    ranks = holders.of(item.text)
    if size_bytes < _SMALL_BYTES or holders.others is not None:
        return next(iter(ranks), 0)
    least = min(ranks, key=lambda rank: (written[rank], rank))
    written[least] += size_bytes
    return least
