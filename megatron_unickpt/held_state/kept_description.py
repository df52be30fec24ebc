"""What a save has described of a sharded state dict, for the next saves.

Megatron makes a new sharded state dict for each save. Its tensors are described anew if a key, a box, the memory, shape or
dtype of a tensor, a parameter, the copies or the ranks are others. What can change between two steps, such as buffers, is no
part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_unickpt.framework import internals
from megatron_unickpt.held_state.sharded_tensors import MASTER, WEIGHT, FoundItem, StateTensor, tensor_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts


@dataclass
class KnownNames:
    """Names and states by key, which do not change."""

    of: dict[str, tuple[str, str]] = field(default_factory=dict)

    def named(self, item: ShardedTensor) -> tuple[str, str]:
        """Return (name, state) of a sharded tensor."""
        found = self.of.get(item.key)
        if found is None:
            found = self.of[item.key] = tensor_of(item.key)
        return found


@dataclass(frozen=True, slots=True)
class ReadState:
    """What a description of sharded tensors reads.

    Attributes:
        changing: sharded tensors that may change between two steps.
        facts: of the others; None if a tensor has no dense memory of its own, such as one in fp8.
    """

    changing: Sequence[FoundItem]
    facts: Facts | None

    @classmethod
    def of(cls, found: Sequence[FoundItem], names: KnownNames, *, share: bool) -> ReadState:
        """Read. The arguments are those of ``capture.description``."""
        tensors = [(each, *names.named(each.item)) for each in found if isinstance(each.item, ShardedTensor)]
        mastered = {name for _, name, state in tensors if state == MASTER}
        changing: list[FoundItem] = []
        parameters: list[Any] = []
        data: list[torch.Tensor] = []
        values: list[Any] = [share, *(internals.data_parallel_ranks(expert=expert) for expert in (False, True))]
        plain = True
        for each, name, state in tensors:
            item, is_parameter = each.item, isinstance(each.origin, torch.nn.Parameter)
            if state == WEIGHT and not is_parameter and name not in mastered:
                changing.append(each)
                continue
            flat = item.flattened_range
            values.append((
                item.key, item.global_shape, item.global_offset, item.local_shape, item.prepend_axis_num, item.replica_id,
                item.dtype, None if flat is None else (flat.start, flat.stop), item.data is None,
                isinstance(item, StateTensor) and item.replicated, is_parameter and getattr(each.origin, "allreduce", True),
            ))  # fmt: skip
            parameters.append(each.origin if is_parameter else None)
            if item.data is not None:
                plain = plain and internals.dequantized(item.data) is item.data
                data.append(item.data)
        return cls(changing, Facts(parameters, data, (), tuple(values)) if plain else None)


@dataclass
class KnownDescription:
    """What the saves of a job keep for each other. It holds no memory of tensors.

    Attributes:
        names: of all keys.
        described: how many saves have described the tensors anew.
    """

    names: KnownNames = field(default_factory=KnownNames)
    described: int = 0
    _facts: KeptFacts | None = None
    _tensors: Sequence[TensorInfo] = ()
    _keeper: Keeper | None = None

    def bound(self, read: ReadState) -> tuple[BoundShards, Sequence[TensorInfo]] | None:
        """Return the shards of an earlier description and its tensors, if what has been read now is what it has read."""
        kept = None if self._keeper is None else self._keeper.kept
        if kept is None or read.facts is None or self._facts is None or not self._facts.fit(read.facts):
            return None
        return BoundShards.of(kept, read.facts.tensors), self._tensors

    def keep(self, read: ReadState, tensors: Sequence[TensorInfo]) -> Keeper | None:
        """Note a new description. Returns what gets its shards, or None if they cannot be kept.

        Args:
            read: what it has read.
            tensors: that it lists, without those of ``read.changing``.
        """
        self.described += 1
        self._facts, self._keeper, self._tensors = None, None, ()
        if read.facts is not None:
            self._facts, self._keeper = KeptFacts(read.facts), Keeper(read.facts.tensors)
            self._tensors = tensors
        return self._keeper
