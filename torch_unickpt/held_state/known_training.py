"""What a ``save_training`` has described, for the next ones of the same model.

It is described anew if a tensor, its memory, shape, strides or dtype, its place in a mesh, a name, or the ranks are others.
What can change at any time, such as hyperparameters, scalars and buffers, is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_unickpt.held_state import describe
from torch_unickpt.held_state.describe import Item
from torch_unickpt.held_state.module_states import extra_key, own_entries
from torch_unickpt.held_state.names import KnownNames, Names
from torch_unickpt.held_state.optimizers import CommonScalar, Optimizers
from torch_unickpt.held_state.samples import samples_of
from unickpt.api.dtensors import is_dtensor
from unickpt.api.group import Group
from unickpt.api.holders import Holders, Keys, Ranks, mesh_digests
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.checkpoint.save.kept import BoundShards, Facts, Keeper, KeptFacts
from unickpt.checkpoint.save.shards import Shard


def trained(name: str) -> str:
    """Return the key of a parameter that an optimizer of a rank steps on."""
    return f"trained {name}"


@dataclass(frozen=True, slots=True)
class DescribedTraining:
    """What a save says of the tensors of this rank.

    Attributes:
        shards: that this rank writes.
        listed: all tensors that it knows.
        bound: further shards, which an earlier save has described; or None.
        keeper: keeps the shards for later saves; or None.
    """

    shards: list[Shard]
    listed: list[TensorInfo]
    bound: BoundShards | None = None
    keeper: Keeper | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """The parts of a description that the next save may use.

    Attributes:
        facts: what it has read.
        keys, meshes: for ``agreed_holders``.
        holders: which ranks hold the same.
        tensors: of the checkpoint that this rank knows, without buffers.
        keeper: has the shards.
        scalar: of the optimizers.
    """

    facts: KeptFacts
    keys: Keys
    meshes: Mapping[Ranks, str]
    holders: Holders
    tensors: Sequence[TensorInfo]
    keeper: Keeper
    scalar: CommonScalar | None


_SAMPLED = 2  # saves: the first one, and one with states


@dataclass
class KnownTraining:
    """What the saves of one model keep for each other. It holds no memory of tensors.

    Attributes:
        names: of the module.
        described: how many saves have described the tensors anew.
        own_entries: entries of the model's state dict that no save stores; None before the first save.
        sampled: how many saves have compared parameters with those of other ranks.
    """

    names: KnownNames = field(default_factory=KnownNames)
    described: int = 0
    own_entries: Sequence[str] | None = None
    sampled: int = 0
    _kept: _Kept | None = None

    def read(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> TrainingState:
        """Read what one save needs. Raises UnsupportedLayoutError if the module or an optimizer is not supported."""
        names = self.names.read(model)
        if self.own_entries is None:
            self.own_entries = own_entries(model, names)
        return TrainingState(self, names, Optimizers(optimizers, names), group)


class TrainingState:
    """What a rank holds at the call of one save.

    Attributes:
        names: of the module.
        optimizers: of the job.
        keys, meshes: for ``agreed_holders``.
    """

    def __init__(self, known: KnownTraining, names: Names, optimizers: Optimizers, group: Group) -> None:
        self.names, self.optimizers = names, optimizers
        self._known, self._group = known, group
        self._states = optimizers.states()
        self._facts = _facts_of(names, optimizers, self._states, group)
        kept = known._kept
        self._kept = kept if kept is not None and kept.keeper.kept is not None and kept.facts.fit(self._facts) else None
        self._items: list[Item] = []
        if self._kept is not None:
            self.keys, self.meshes = self._kept.keys, self._kept.meshes
            return
        known._kept = None
        self._items = describe.items_of(names, optimizers, group)
        self.keys = Keys.of(
            [
                *(item.text for item in self._items if item.plain),
                *(trained(each.name) for each in optimizers.parameters),
                *map(extra_key, names.extra),
            ]
        )
        self.meshes = mesh_digests((item.key, item.value) for item in self._items if is_dtensor(item.value))

    def samples(self) -> dict[str, str]:
        """Return samples of the parameters that other ranks may hold as copies; none if earlier saves have had them."""
        items = self._items if len(self._group.ranks) > 1 and self._known.sampled < _SAMPLED else []
        self._known.sampled += bool(items)
        return samples_of({each.key[0]: each.value for each in items if each.kind == "parameter" and each.plain})  # type: ignore[misc]

    def record(self) -> OptimizerRecord | None:
        """Return settings and scalars of the optimizers; None without one."""
        return self.optimizers.record(self._states, None if self._kept is None else self._kept.scalar)

    def described(self, holders: Holders, *, steady: bool) -> DescribedTraining:
        """Return what this rank says of its tensors.

        Args:
            holders: which ranks hold the same.
            steady: parameters and states of the optimizer change only in its steps.
        """
        if self._kept is not None and steady and holders == self._kept.holders:
            assert self._kept.keeper.kept is not None  # condition of ``_kept``
            buffers = describe.description(describe.buffers_of(self.names), holders, self._group)
            bound = BoundShards.of(self._kept.keeper.kept, self._facts.tensors)
            return DescribedTraining(buffers.shards(), [*self._kept.tensors, *buffers.tensors], bound)
        self._known.described += 1
        items = self._items or describe.items_of(self.names, self.optimizers, self._group)
        found = describe.description(items, holders, self._group, steady=steady)
        listed = [info for info in found.tensors if info.kind != "buffer"]
        keeper = None
        self._known._kept = None
        if steady:
            keeper = Keeper(self._facts.tensors)
            scalar = self.optimizers.common_scalar(self._states)
            self._known._kept = _Kept(KeptFacts(self._facts), self.keys, self.meshes, holders, listed, keeper, scalar)
        return DescribedTraining(found.shards(), found.tensors, None, keeper)


def _facts_of(names: Names, optimizers: Optimizers, states: Sequence[Mapping[str, Any]], group: Group) -> Facts:
    """Return what a description reads. The bases of its shards are the ``tensors``."""
    stepped = optimizers.parameters
    values = [value for state in states for value in state.values()]
    held = [*names.parameters.values(), *(value for value in values if isinstance(value, torch.Tensor))]
    buffers = list(names.buffers.values())
    placed = [each for each in (*held, *buffers) if isinstance(each, DTensor)] if _divided(held, buffers) else []
    read = (
        group, list(names.parameters), list(names.buffers), list(names.extra), names.aliases,
        list(map(tuple, states)), list(map(type, values)),
        [(each.placements, tuple(each.shape)) for each in placed],
    )  # fmt: skip
    objects = [*held, *buffers, *(each.parameter for each in stepped), *(each.device_mesh for each in placed)]
    with torch.no_grad():  # FSDP makes another local tensor of the same memory in each step
        tensors = [each.to_local() if isinstance(each, DTensor) else each for each in held] if placed else held
    return Facts(objects, tensors, buffers, read)


def _divided(*tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some are DTensors."""
    return any(issubclass(kind, DTensor) for each in tensors for kind in set(map(type, each)))
