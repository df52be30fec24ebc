"""Hyperparameters and steps of Megatron's optimizers, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from megatron_unickpt.framework import optimizer_internals as internals
from megatron_unickpt.framework.optimizer_internals import HeldRange, Leaf
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_groups
from unickpt.checkpoint.state.optimizer_record import decoded, encoded, family_of
from unickpt.transform.convert.megatron import keys


@dataclass(frozen=True, slots=True)
class Named:
    """The global tensors of an optimizer's parameters on this rank.

    Attributes:
        names: parameter (by id) -> names of the global tensors that it is part of.
        described: parameters (by id) whose hyperparameters this rank saves, because it holds the first copy of a part of
            their state.
    """

    names: Mapping[int, tuple[str, ...]]
    described: frozenset[int]


@dataclass
class OptimizerPart:
    """This rank's optimizer, carried by its state dict from ``sharded_state_dict`` to ``load_state_dict``.

    Attributes:
        optimizer: Megatron's optimizer.
        leaves: optimizers that step, with the ranges of parameters that they hold on this rank.
        name: returns the global tensors of its parameters; called at most once, by ``named``.
        record: hyperparameters and step by parameter name; set by a load.
        grad_scaler: state of the loss scaler; set by a load, or to be saved.
        loaded: whether a load has filled the tensors.
        began: names of parameters without state when the checkpoint was saved (frozen, or without a gradient before); their
            state begins at zero.
        model: the model's sharded tensors and factories by the id of their parameter.
        allocated: whether states that did not exist were allocated, to be filled.
        native: returns the state in Megatron's form; None if the caller asked for the form by parameter itself.
    """

    optimizer: Any
    leaves: list[Leaf]
    name: Callable[[], Named]
    record: OptimizerRecord | None = None
    grad_scaler: Any = None
    loaded: bool = False
    began: frozenset[str] = frozenset()
    model: Mapping[int, Any] = field(default_factory=dict)
    allocated: bool = False
    native: Callable[[], Any] | None = None

    @cached_property
    def named(self) -> Named:
        """Global tensors of the parameters. An equal one may be set, which an earlier save has kept."""
        return self.name()


def record_of(part: OptimizerPart, *, alone: bool = True) -> OptimizerRecord | None:
    """Return hyperparameters and step of the parameters on this rank, by name; None if there are none.

    Args:
        part: this rank's optimizer.
        alone: True adds parameters that another rank describes, and groups without parameters.
    """
    groups: list[ParameterGroup] = []
    scalars: dict[tuple[Any, ...], tuple[dict[str, Any], list[str]]] = {}  # of one value: it, and the names
    of, described = part.named.names, part.named.described
    for leaf in part.leaves:
        by_group: dict[int, tuple[dict[str, Any], list[HeldRange]]] = {}
        for held in leaf.held:
            by_group.setdefault(id(held.group), (held.group, []))[1].append(held)
        for group in leaf.inner.param_groups:
            members = [held for held in by_group.get(id(group), (group, []))[1] if alone or id(held.parameter) in described]
            if not members and not alone:
                continue
            names = tuple(dict.fromkeys(n for held in members for n in of[id(held.parameter)]))
            values = {key: value for key, value in group.items() if key not in ("params", "step")}
            groups.append(encoded(values, names, typed=False))
            step = {"step": group["step"]} if "step" in group else {}
            for held in members:
                each = {key: _number(value) for key, value in (step | held.scalars).items()}
                same = (*each, *map(type, each.values()), *map(repr, each.values()))
                scalars.setdefault(same, (each, []))[1].extend(of[id(held.parameter)])
    if not part.leaves or not (alone or groups):
        return None
    held_scalars = (encoded(each, names, typed=False) for each, names in scalars.values())
    counted = merge_groups(scalar for scalar in held_scalars if scalar.hyperparameters or scalar.left_out)
    return OptimizerRecord(internals.name_of(part.leaves[0]), tuple(groups), counted, internals.stepped(part.leaves))


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element, and any other value as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def restore_hyperparameters(part: OptimizerPart, leaf: Leaf) -> None:
    """Set groups and steps of an optimizer from ``part.record``. Without one the groups keep their values.

    A step that the checkpoint lacks is that of a new optimizer, also if this one has stepped. A state is None if it was for all
    global tensors of its parameter.
    """
    record = part.record or OptimizerRecord("", (), ())
    steps = {name: entry.hyperparameters for entry in record.scalars for name in entry.parameters}
    latest = max((float(s["step"]) for s in steps.values() if isinstance(s.get("step"), (int, float))), default=None)
    grouped = {name for group in record.groups for name in group.parameters}
    related = family_of(record.name) == family_of(internals.name_of(leaf))
    members: dict[int, list[str]] = {}
    for held in leaf.held:
        members.setdefault(id(held.group), []).extend(part.named.names[id(held.parameter)])
        found = [steps[n] for n in part.named.names[id(held.parameter)] if n in steps]
        counted = [each["step"] for each in found[:1] if each.get("step") is not None]
        step = float(counted[0]) if counted else latest
        if part.began.intersection(part.named.names[id(held.parameter)]):
            step = 0.0
        none = _none_of(found) - held.states.keys() - held.others.keys() if related else frozenset()
        if internals.steps_per_parameter(leaf) and "step" not in none:
            internals.set_step(leaf, held, step or 0.0)
        internals.set_none(leaf, held, none)
    for group in leaf.inner.param_groups:
        names = members.get(id(group), [])
        source = _source(record, group, names)
        if source is not None:
            _set_group(group, source)
        if not internals.steps_per_parameter(leaf):
            named = [steps[n]["step"] for n in names if n in steps and steps[n].get("step") is not None]
            counts = grouped.isdisjoint(names)  # Muon, for one, has no step
            _set_step(group, float(named[0]) if named else latest if counts else None)


def _none_of(states: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the keys that all of these states have as None."""
    keys = [frozenset(key for key, value in each.items() if value is None) for each in states]
    return frozenset.intersection(*keys) if keys else frozenset()


def _set_group(group: dict[str, Any], source: ParameterGroup) -> None:
    for key, value in decoded(source, where="optimizer group").items():
        if key not in internals.SWITCHES and (key in group or key in ("max_lr", "min_lr", "lr")):
            group[key] = value


def _set_step(group: dict[str, Any], step: float | None) -> None:
    """Set the step of a group; None: as before the first one."""
    if step is not None:
        group["step"] = int(step)
    else:
        group.pop("step", None)


def _source(record: OptimizerRecord, group: Mapping[str, Any], names: Collection[str]) -> ParameterGroup | None:
    """Return the stored group for a group of this rank: the one that has its parameters.

    Layers share a name (``decoder.layers.mlp.linear_fc1.weight``), and the record has each name once. If groups divide the
    layers, names fit several groups, or a group has lost all its names to another one. Megatron's identity of groups then
    decides, and after it the values that no schedule changes.

    Args:
        record: groups of the checkpoint.
        group: group of this rank's optimizer.
        names: of its parameters on this rank.
    """
    own = _identity(group)
    same = [each for each in record.groups if _identity(each.hyperparameters) == own]
    named = [each for each in record.groups if not set(names).isdisjoint(each.parameters)]
    if not named:
        return next(iter(same), None)
    among = named + [each for each in same if not each.parameters]
    return max(among, key=lambda each: (each in same, _alike(each, group), len(each.parameters)))


def _identity(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of the keys that identify groups in Megatron."""
    return tuple(values.get(key, values.get(f"pre_{key}")) for key in keys.GROUP_IDENTITY)


def _alike(stored: ParameterGroup, group: Mapping[str, Any]) -> int:
    """Return how many values of a stored group are those of a group, without the ones that schedulers set."""
    held = decoded(stored, where="optimizer group")
    return sum(key in group and group[key] == value for key, value in held.items() if key not in ("lr", "weight_decay"))
