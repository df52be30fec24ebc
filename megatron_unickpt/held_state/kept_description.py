"""What a save has described of a sharded state dict, for the next saves.

Megatron makes a new sharded state dict for each save. Its tensors are described anew if a key, a box, the memory, shape or
dtype of a tensor, a parameter, what an optimizer holds, the copies or the ranks are others. What can change between two steps,
such as buffers, is no part of it. The sharded tensors of an optimizer's state are not made for the comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_unickpt.framework import internals
from megatron_unickpt.held_state.hyperparameters import Named, OptimizerPart
from megatron_unickpt.held_state.sharded_tensors import WEIGHT, FoundItem, tensor_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts

_facts = attrgetter(
    "key", "global_shape", "global_offset", "local_shape", "prepend_axis_num", "replica_id", "dtype", "flattened_range"
)  # fmt: skip


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
    def of(
        cls, found: Sequence[FoundItem], parts: Sequence[OptimizerPart], names: KnownNames, mastered: Collection[str], *,
        share: bool,
    ) -> ReadState:  # fmt: skip
        """Read.

        Args:
            found: sharded tensors and objects that are not of ``parts``.
            parts: optimizers whose tensors are described later.
            names: what is known of keys.
            mastered: names of the weights that have a master.
            share: as for ``capture.description``.
        """
        changing: list[FoundItem] = []
        objects: list[Any] = []
        data: list[torch.Tensor] = []
        values: list[Any] = [share, *(internals.data_parallel_ranks(expert=expert) for expert in (False, True))]
        plain = True
        for each in found:
            item, origin = each
            if not isinstance(item, ShardedTensor):
                continue
            is_parameter = isinstance(origin, torch.nn.Parameter)
            name, state = names.named(item)
            if state == WEIGHT and not is_parameter and name not in mastered:
                changing.append(each)
                continue
            values += (
                _facts(item), item.data is None, getattr(item, "replicated", False),
                is_parameter and getattr(origin, "allreduce", True),
            )  # fmt: skip
            objects.append(origin if is_parameter else None)
            if item.data is not None:
                plain = plain and internals.dequantized(item.data) is item.data
                data.append(item.data)
        for leaf in (leaf for part in parts for leaf in part.leaves):
            values.append((leaf.instance, len(leaf.held), len(leaf.elsewhere)))
            objects += leaf.elsewhere
            for held in leaf.held:
                values.append((held.lo, held.hi, held.instance, tuple(held.states), tuple(held.others)))
                objects.append(held.parameter)
                data += (held.main, *held.states.values(), *held.others.values())
        return cls(changing, Facts(objects, data, (), tuple(values)) if plain else None)


@dataclass
class KnownDescription:
    """What the saves of a job keep for each other. It holds no memory of tensors.

    Attributes:
        names: of all keys.
        mastered: names of the weights that have a master.
        optimizers: those that a save has described.
        described: how many saves have described the tensors anew.
    """

    names: KnownNames = field(default_factory=KnownNames)
    mastered: Collection[str] = frozenset()
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)
    described: int = 0
    _facts: KeptFacts | None = None
    _named: Sequence[Named] = ()
    _tensors: Sequence[TensorInfo] = ()
    _keeper: Keeper | None = None

    def bound(self, read: ReadState, parts: Sequence[OptimizerPart]) -> tuple[BoundShards, Sequence[TensorInfo]] | None:
        """Return the shards of an earlier description and its tensors, if what has been read now is what it has read.

        The optimizers then get the names of that description.
        """
        kept = None if self._keeper is None else self._keeper.kept
        if kept is None or read.facts is None or self._facts is None or not self._facts.fit(read.facts):
            return None
        for part, named in zip(parts, self._named, strict=True):
            part.named = named
        return BoundShards.of(kept, read.facts.tensors), self._tensors

    def keep(self, read: ReadState, parts: Sequence[OptimizerPart], tensors: Sequence[TensorInfo]) -> Keeper | None:
        """Note a new description. Returns what gets its shards, or None if they cannot be kept.

        Args:
            read: what it has read.
            parts: the optimizers.
            tensors: that it lists, without those of ``read.changing``.
        """
        self.described += 1
        self._facts, self._keeper, self._tensors, self._named = None, None, (), ()
        self.optimizers.update(part.optimizer for part in parts)
        if read.facts is not None:
            self._facts, self._keeper = KeptFacts(read.facts), Keeper(read.facts.tensors)
            self._tensors, self._named = tensors, [part.named for part in parts]
        return self._keeper
