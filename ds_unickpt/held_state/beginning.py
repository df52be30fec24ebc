"""The state of an engine when it was created, for a load from a checkpoint that lacks a part of the state.

An engine that has trained then goes on as a new one would: the part begins anew, and does not keep a later value.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_unickpt.framework import internals
from unickpt.checkpoint.state.first_step import STEP
from unickpt.checkpoint.state.optimizer_record import NOT_HYPERPARAMETERS


@dataclass(frozen=True, slots=True)
class Beginning:
    """The small parts of the first state of an engine. An empty one restores nothing.

    Attributes:
        groups: settings of the parameter groups, in their order.
        objects: states of schedulers and scalers by their name in a checkpoint, each with the class of the object.
    """

    groups: Sequence[Mapping[str, Any]] = ()
    objects: Mapping[str, tuple[type[Any], Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Any) -> Beginning:
        """Return the state of a new engine, without what cannot be copied. Never raises: training does not depend on it."""
        found = dict[str, tuple[type[Any], Any]]()
        with contextlib.suppress(Exception):
            for name, target in _stateful(engine).items():
                with contextlib.suppress(Exception):  # a class of the user
                    found[name] = (type(target), copy.deepcopy(target.state_dict()))
            scaler = internals.loss_scaler(engine)
            if scaler is not None:
                found["loss_scaler"] = (type(scaler), internals.scaler_values(scaler))
        groups: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):
            base = internals.base_optimizer(engine)
            groups = [] if base is None else [_settings(group) for group in base.param_groups]
        return cls(groups, found)

    def reset_group(self, number: int, group: MutableMapping[str, Any]) -> None:
        """Set the settings of a parameter group to their first values."""
        if number < len(self.groups):
            group.update(copy.deepcopy(dict(self.groups[number])))

    def reset_step(self, number: int, group: MutableMapping[str, Any]) -> None:
        """Set the step in a parameter group to its first value. An optimizer may create it in its first step."""
        before = self.groups[number] if number < len(self.groups) else {}
        if STEP in before:
            group[STEP] = copy.deepcopy(before[STEP])
        else:
            del group[STEP]

    def reset(self, name: str, target: Any) -> bool:
        """Set an object to its first state. Returns False if that is unknown."""
        if name not in self.objects or self.objects[name][0] is not type(target):
            return False
        state = self.objects[name][1]
        if name == "loss_scaler":
            for key, value in state.items():
                setattr(target, key, value)
        else:
            target.load_state_dict(copy.deepcopy(state))
        return True


def _stateful(engine: Any) -> dict[str, Any]:
    objects = {"lr_scheduler": engine.lr_scheduler, "grad_scaler": internals.grad_scaler(engine)}
    others = {name: target for name, target in internals.extra_states(engine).items() if name != internals.SAMPLER}
    return {name: target for name, target in {**objects, **others}.items() if target is not None}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the settings of a group. It may also hold objects that have none, such as a process group or a lock."""
    found = dict[str, Any]()
    for key, value in group.items():
        if key not in NOT_HYPERPARAMETERS:
            with contextlib.suppress(Exception):
                found[key] = copy.deepcopy(value)
    return found
