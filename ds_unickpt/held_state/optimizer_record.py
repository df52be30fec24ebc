"""The non-tensor state of an optimizer: hyperparameters, scalar states, and which states are elementwise.

Scalars are stored twice. The manifest has them by parameter name, for every layout. Each rank also stores those of its own
partitions, and gets them back exactly under the same layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_unickpt.framework.partitions import Partition, states_of
from ds_unickpt.held_state.names import ModuleNames
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_groups
from unickpt.checkpoint.state.first_step import STEP
from unickpt.checkpoint.state.optimizer_record import NOT_HYPERPARAMETERS, encoded


@dataclass(frozen=True, slots=True)
class ElementStates:
    """Keys of an optimizer's state: tensors of the parameter's shape, scalars, and all others (``owned_states``)."""

    tensors: frozenset[str]
    scalars: frozenset[str]
    owned: frozenset[str]


def classify(partitions: Sequence[Partition], base: torch.optim.Optimizer | None) -> ElementStates:
    """Classify the keys of an optimizer's state as elementwise tensors, scalars, or states that belong to their owner.

    A key is elementwise if its values have the shape of their parameter. For a one-element parameter the shape does not
    decide, because ``step`` may have the same shape. The other parameters decide then. If there are none, ``step`` is a
    scalar and all other keys are elementwise. A key with a value of another kind, or of different kinds, belongs to its owner.
    None is a value of no kind: the record has it with the scalars of its partition.
    """
    votes: dict[str, set[str]] = {}
    for partition in partitions if base is not None else ():
        assert base is not None
        for key, value in states_of(base, partition).items():
            if value is not None:
                votes.setdefault(key, set()).add(_nature(key, value, partition))
    owned = {key for key, kinds in votes.items() if "owned" in kinds or {"tensor", "scalar"} <= kinds}
    tensors = {key for key, kinds in votes.items() if "tensor" in kinds or (kinds == {"either"} and key != STEP)} - owned
    return ElementStates(frozenset(tensors), frozenset(set(votes) - tensors - owned), frozenset(owned))


def _nature(key: str, value: Any, partition: Partition) -> str:
    if isinstance(value, (bool, int, float)):
        return "scalar"
    if isinstance(value, torch.Tensor) and tuple(value.shape) == partition.shape(key):
        return "either" if value.numel() == 1 else "tensor"
    return "scalar" if isinstance(value, torch.Tensor) and value.numel() == 1 else "owned"


def listed_names(partitions: Sequence[Partition], names: ModuleNames) -> list[list[str]]:
    """Return the names of the parameters of each partition."""
    return [[names.name(p) for p in part.parameters] for part in partitions]


def record_of(
    partitions: Sequence[Partition], every: Sequence[Sequence[str]], base: torch.optim.Optimizer, kinds: ElementStates
) -> OptimizerRecord:
    """Return hyperparameters and scalar states by parameter name.

    Args:
        partitions: of this rank.
        every: ``listed_names`` of them.
        base: the optimizer that steps on them.
        kinds: ``classify`` of them.
    """
    groups: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
    scalars: list[ParameterGroup] = []
    for part, listed in zip(partitions, every, strict=True):
        groups.setdefault(id(part.group), (part.group, []))[1].extend(listed)
        values = _scalars(part, base, kinds)
        repeated = (STEP,) if STEP in part.group and STEP not in values else ()
        # readers of before ``repeated`` take the group's step from here
        scalars.append(encoded(values | {key: part.group[key] for key in repeated}, listed, repeated=repeated))
    return OptimizerRecord(
        type(base).__name__,
        tuple(encoded(_settings(group), listed) for group, listed in groups.values()),
        merge_groups(group for group in scalars if group.hyperparameters or group.left_out),
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def _scalars(part: Partition, base: torch.optim.Optimizer, kinds: ElementStates) -> dict[str, Any]:
    held = states_of(base, part)
    found = {key: held[key] for key in sorted(key for key in held if key in kinds.scalars or held[key] is None)}
    if part.stepped_by is not None and isinstance(found.get(STEP), torch.Tensor):
        found[STEP] = int(found[STEP])  # as the engine's own optimizer keeps it
    return found


# ---------------------------------------------------------------- scalars of one rank


@dataclass(frozen=True, slots=True)
class RankScalars:
    """Scalars of this rank's partitions, and settings of the parameter groups, in order.

    Attributes:
        layout: digest of the layout of the partitions. The values apply to this layout only.
        partitions: scalars of each partition.
        groups: settings of each parameter group.
    """

    layout: str
    partitions: tuple[ParameterGroup, ...]
    groups: tuple[ParameterGroup, ...]

    @classmethod
    def of(cls, partitions: Sequence[Partition], layout: str, base: torch.optim.Optimizer, kinds: ElementStates) -> RankScalars:
        """Return the scalars of partitions. ``layout``: ``layout_of`` them, ``kinds``: ``classify`` of them."""
        groups = {id(part.group): part.group for part in partitions}
        return cls(
            layout,
            tuple(encoded(_scalars(part, base, kinds)) for part in partitions),
            tuple(encoded(_settings(group)) for group in groups.values()),
        )

    @classmethod
    def from_object(cls, value: Any) -> RankScalars | None:
        """Return the scalars that ``to_object`` encoded; None for any other value."""
        try:
            distinct = [
                ParameterGroup(v, (), {k: (d, tuple(s), p) for k, (d, s, p) in t.items()}) for v, t in value["distinct"]
            ]
            partitions, groups = ([distinct[at] for at in value[key]] for key in ("partitions", "groups"))
            return cls(str(value["layout"]), tuple(partitions), tuple(groups))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None

    def to_object(self) -> dict[str, Any]:
        """Return plain values. Equal groups are stored once."""
        distinct: dict[str, int] = {}
        values: list[Any] = []
        places: dict[str, list[int]] = {"partitions": [], "groups": []}
        for key, held in (("partitions", self.partitions), ("groups", self.groups)):
            for group in held:
                if group.identity() not in distinct:
                    distinct[group.identity()] = len(values)
                    values.append([group.hyperparameters, {k: list(v) for k, v in (group.tensors or {}).items()}])
                places[key].append(distinct[group.identity()])
        return {"layout": self.layout, "distinct": values, **places}

    def fingerprint(self) -> str:
        """Return a digest of the values. It does not depend on the layout of the partitions."""
        return digest(json.dumps([[g.identity() for g in held] for held in (self.partitions, self.groups)]).encode())


def layout_of(partitions: Sequence[Partition], names: ModuleNames, base: torch.optim.Optimizer) -> str:
    """Return a digest of the optimizer's class and of the parameter ranges in this rank's partitions."""
    places = [place_of(part, names.name) for part in partitions]
    return digest(json.dumps([type(base).__name__, places]).encode())


def place_of(part: Partition, name: Callable[[torch.nn.Parameter], str]) -> list[Any]:
    """Return the number of elements of a partition and its parameter ranges, as JSON: ``[n, [[name, lo, hi, at], ...]]``."""
    return [part.elements.numel(), [[name(p.parameter), p.lo, p.hi, p.at] for p in part.pieces]]
