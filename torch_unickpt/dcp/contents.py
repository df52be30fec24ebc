"""What a state dict of DCP holds, in the terms of a checkpoint: tensors by name, the record of the optimizer, other values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_unickpt.dcp.tree import Path, Tree
from torch_unickpt.dcp.values import restored, stored
from torch_unickpt.held_state.describe import Item
from unickpt.api.dtensors import is_dtensor
from unickpt.api.state import Value
from unickpt.base.errors import UnsupportedLayoutError
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_groups
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.filling import WEIGHT
from unickpt.checkpoint.state.optimizer_record import decoded, encoded

OBJECT = "dcp"  # name in the objects of the job; what other ranks keep has the shared name ``dcp/<rank>``
_TREE, _VALUES, _PATHS = "tree", "values", "paths"


@dataclass
class Contents:
    """A state dict of one rank.

    Attributes:
        tree: where model and optimizer lie.
        items: tensors.
        record: of the optimizer; None without one.
        values: other values by key, without those that the record has.
        paths: of the keys that the tree does not derive.
    """

    tree: Tree
    items: list[Item] = field(default_factory=list)
    record: OptimizerRecord | None = None
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Iterable[tuple[str, Value]],
        others: Mapping[str, Any],
        paths: Mapping[str, Path],
        tree: Tree | None = None,
    ) -> Contents:
        """Return what a state dict holds.

        Args:
            tensors: keys, and tensors or parts of them.
            others: other values by key.
            paths: paths by key; empty if the state dict was not flattened.
            tree: that of all ranks. None: that of these keys.

        Raises:
            UnsupportedLayoutError: a tensor has no name.
        """
        tensors = list(tensors)
        keys = [key for key, _ in tensors]
        found = cls(Tree.of(keys, others) if tree is None else tree.over(keys))
        shapes = {found.tree.name_of(key): _shape(value) for key, value in tensors}
        scalars: dict[str, dict[str, Any]] = {}
        for key, value in tensors:
            name, state = found.tree.name_of(key)
            if not name:
                raise UnsupportedLayoutError("the state dict has a tensor without a name")
            if key in found.tree.generic or paths.get(key, ()) != found.tree.path_of_key(key):
                found.paths[key] = paths.get(key, (key,))
            if found.tree.is_state(key) and _is_scalar(state, value, shapes.get((name, WEIGHT))):
                scalars.setdefault(name, {})[state] = value
                continue
            kind = "optimizer" if state != WEIGHT else "buffer" if key in found.tree.generic else "parameter"
            found.items.append(Item((name, state), value, kind, divided=False))
        settings: dict[str, dict[str, Any]] = {}
        for key, value in others.items():
            setting = found.tree.setting_of(key)
            if paths.get(key, ()) != found.tree.path_of_key(key):
                found.paths[key] = paths.get(key, (key,))
            if setting is not None:
                settings.setdefault(setting[0], {})[setting[1]] = value
                if found.tree.flat:
                    continue
            elif found.tree.is_state(key):
                name, state = found.tree.name_of(key)
                scalars.setdefault(name, {})[state] = value
                continue
            found.values[key] = stored(value)
        found.record = found._record(scalars, settings)
        return found

    def _record(self, scalars: dict[str, dict[str, Any]], settings: dict[str, dict[str, Any]]) -> OptimizerRecord | None:
        if self.tree.optimizer is None:
            return None
        where = self.tree.optimizer
        of_states = [self._encoded(f"{where}state.{name}.", values, (name,)) for name, values in scalars.items()]
        if self.tree.flat:
            groups = [self._encoded(f"{where}param_groups.{name}.", values, (name,)) for name, values in settings.items()]
        else:
            groups = [
                encoded({k: v for k, v in values.items() if k != "params"}, _names(values.get("params")))
                for _, values in sorted(settings.items())
            ]
        stepped = bool(scalars) or any(item.kind == "optimizer" for item in self.items)
        return OptimizerRecord(_optimizer_name(self.items), merge_groups(groups), merge_groups(of_states), stepped)

    def _encoded(self, prefix: str, values: Mapping[str, Any], names: tuple[str, ...]) -> ParameterGroup:
        """Return values of a parameter for the record. Those that it cannot have are kept as values of their own."""
        found = encoded(values, names)
        for key in found.left_out:
            self.values[prefix + key] = values[key]
            self.paths.setdefault(prefix + key, self.tree.path_of_key(prefix + key))
        return replace(found, left_out=())

    def has(self, name: str) -> bool:
        """Whether this rank has a weight of this name."""
        return any(item.key == (name, WEIGHT) for item in self.items)

    @property
    def steps(self) -> int:
        """Steps of the optimizer; 0 if its states do not count them."""
        scalars = () if self.record is None else self.record.scalars
        found = [each.hyperparameters.get("step") for each in scalars]
        return max((int(each) for each in found if isinstance(each, (int, float)) and each >= 0), default=0)

    @property
    def kept(self) -> list[str]:
        """Keys of the values and the paths."""
        return list(dict.fromkeys((*self.values, *self.paths)))

    def objects(self, own: Iterable[str]) -> dict[str, Any]:
        """Return what the objects of the job have. ``own``: those of ``kept`` that the first rank stores."""
        return {OBJECT: {_TREE: self.tree.as_json(), **self._of_keys(set(own))}}

    def shared_objects(self, rank: int, own: Iterable[str]) -> dict[str, Any]:
        """Return what the shared objects have: those of ``kept`` that another rank than the first one stores."""
        keys = set(own)
        return {f"{OBJECT}/{rank}": self._of_keys(keys)} if keys else {}

    def _of_keys(self, keys: Collection[str]) -> dict[str, Any]:
        paths = {key: path for key, path in self.paths.items() if key in keys}
        return {
            _VALUES: {key: value for key, value in self.values.items() if key in keys},
            _PATHS: {key: [[type(part) is int, str(part)] for part in path] for key, path in paths.items()},
        }


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value.global_shape


def _is_scalar(state: str, value: Value, weight: tuple[int, ...] | None) -> bool:
    plain = isinstance(value, torch.Tensor) and not is_dtensor(value)
    return plain and _shape(value) == () and (state == "step" or weight != ())


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()


def _optimizer_name(items: Iterable[Item]) -> str:
    """Return the class of an optimizer as far as its states tell: a state dict does not name it."""
    states = {item.key[1] for item in items if item.kind == "optimizer"}
    if {"exp_avg", "exp_avg_sq"} <= states:
        return "AdamW"
    if states == {"momentum_buffer"}:
        return "SGD"
    return f"torch ({', '.join(sorted(states))})" if states else "torch"


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, in the terms of a state dict. Of a checkpoint that DCP did not write, those of the default tree.

    Attributes:
        checkpoint: under the names of this job.
        tree: of the job that saved.
        values: other values, by key.
        paths: paths of further keys.
        scalars, settings: scalar states, and settings of the group, of each parameter.
        stepped: parameters that have states.
        allow_pickle: values that are stored as pickles are unpickled.
        left_out: values that were not read, and why.
    """

    checkpoint: Checkpoint
    tree: Tree
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    scalars: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Mapping[str, Any]]
    stepped: frozenset[str]
    allow_pickle: bool = False
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, allow_pickle: bool = False) -> Stored:
        """Read the objects of a checkpoint."""
        objects = checkpoint.objects(allow_pickle=allow_pickle)
        found = objects.value.get(OBJECT)
        found = found if isinstance(found, Mapping) else {}
        names = [name for name in checkpoint.shared_names() if name.startswith(f"{OBJECT}/")]
        others = [checkpoint.shared_object(name, allow_pickle=allow_pickle) for name in names]
        left_out = tuple(str(each) for read in (objects, *others) for each in read.left_out)
        values: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for each in (found, *(other.value for other in others if isinstance(other.value, Mapping))):
            values |= {key: restored(value) for key, value in (each.get(_VALUES) or {}).items()}
            for key, path in (each.get(_PATHS) or {}).items():
                paths[key] = tuple(int(part) if number else part for number, part in path)
        tree = Tree.from_json(found[_TREE]) if _TREE in found else Tree()
        record, where = checkpoint.manifest.optimizer, str(checkpoint.storage)
        scalars, settings = ({}, {}) if record is None else (_by_name(each, where) for each in (record.scalars, record.groups))
        states = (info.name for info in checkpoint.index.tensors if info.kind == "optimizer")
        stepped = frozenset((*states, *scalars))
        return cls(checkpoint, tree, values, paths, scalars, settings, stepped, allow_pickle, left_out)


def _by_name(groups: Iterable[ParameterGroup], where: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        values = decoded(group, where=where, device=torch.device("cpu"))
        for name in group.parameters:
            found.setdefault(name, {}).update(values)
    return found
