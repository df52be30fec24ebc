"""What a save has described, for the next saves of the same engine.

The description is made anew if a tensor, its memory, shape or dtype, a parameter's place, the ranks, or an option is another.
What can change at any time, such as hyperparameters, scalars and buffers, is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from ds_unickpt.framework.partitions import KnownRanges
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import KnownNames
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts


@dataclass(frozen=True, slots=True)
class ReadState:
    """What a description of the tensors of an engine reads.

    Attributes:
        ranges: the parameter ranges of each partition, and its parameters.
        facts: the rest.
    """

    ranges: Sequence[Any]
    facts: Facts

    @classmethod
    def of(cls, view: EngineView, others: Sequence[str], options: tuple[Any, ...]) -> ReadState:
        """Read.

        Args:
            view: of the engine.
            others: names of the parameters outside the optimizer.
            options: what a description depends on beside the engine.
        """
        parts, parameters = view.parts, view.names.parameters
        others = [name for name in others if name in parameters]
        bases: list[torch.Tensor] = []
        values: list[Any] = [view.placed, view.wrapper, others, options, view.kinds, list(parameters)]
        objects: list[Any] = []
        for part in parts:
            states = view.states(part)
            bases += [part.elements, *([] if part.weight is None else [part.weight]), *states.values()]
            objects.append(part.stepped_by)
            values.append((part.weight is None, tuple(states), part.replicated, part.stored, part.across, len(part.whole)))
        held = [parameters[name] for name in others]
        bases += [getattr(each, "ds_tensor", each) for each in held]
        values.append([each.requires_grad for each in held])
        if view.engine.zero_optimization_partition_weights():
            values.append([(getattr(each, "ds_shape", None), each.dtype) for each in parameters.values()])
            shaped: Sequence[torch.Tensor] = ()
        else:
            shaped = list(parameters.values())
        ranges = [each for part in parts for each in (part.pieces, part.parameters)]
        return cls(ranges, Facts([*objects, *bases, *parameters.values()], bases, shaped, tuple(values)))


class KeptDescription:
    """The tensors of an engine as a save has described them, without what holds their memory.

    Args:
        read: what the description has read.
        tensors: tensors of the checkpoint that this rank knows, without buffers.
        others: names of the parameters outside the optimizer.
        excluded: names of excluded parameters.
        keeper: gets the shards.
    """

    def __init__(
        self, read: ReadState, tensors: Sequence[TensorInfo], others: Sequence[str], excluded: tuple[str, ...], keeper: Keeper,
    ) -> None:  # fmt: skip
        self._facts, self._ranges = KeptFacts(read.facts), read.ranges
        self.tensors, self.others, self.excluded, self.keeper = tensors, others, excluded, keeper

    def bound(self, read: ReadState) -> BoundShards | None:
        """Return the shards, if what has been read now is what the description has read."""
        kept = self.keeper.kept
        same = len(read.ranges) == len(self._ranges) and all(map(is_, read.ranges, self._ranges))
        if kept is None or not same or not self._facts.fit(read.facts):
            return None
        return BoundShards.of(kept, read.facts.tensors)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """What the record of an optimizer says of its partitions beside values.

    Attributes:
        read: what it was made from, compared by identity: names of the parameters, ranges of the partitions.
        names: ``listed_names`` of the partitions.
        layout: ``layout_of`` them.
    """

    read: Sequence[Any]
    names: Sequence[Sequence[str]]
    layout: str


@dataclass
class KnownState:
    """What the saves of one engine keep for each other. It holds no memory of tensors.

    Attributes:
        names: of the module.
        ranges: parameter ranges of the partitions.
        description: of the last save, or None.
        partitions: of the last save, or None.
        described: how many saves have described the tensors anew.
        own_entries: entries of the module's state dict that only its own code gives; None before the first save.
    """

    names: KnownNames = field(default_factory=KnownNames)
    ranges: KnownRanges = field(default_factory=KnownRanges)
    description: KeptDescription | None = None
    partitions: PartitionFacts | None = None
    described: int = 0
    own_entries: Sequence[str] | None = None
