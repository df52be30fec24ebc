"""The keys of a state dict of DCP as names of tensors, and back. Pure functions.

DCP joins the path of a value to its key: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``. Where model
and optimizer lie in the dictionary differs between programs. A checkpoint has the names of the plain module, so that every
framework finds them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unickpt.checkpoint.state.filling import WEIGHT

Name = tuple[str, str]
Path = tuple[Any, ...]

_STATE, _GROUPS = "state.", "param_groups."
_GROUP = re.compile(r"(\d+)\.(.+)", re.DOTALL)
_MODELS = ("model.", "module.", "state_dict.", "app.model.", "app.")


@dataclass(frozen=True)
class Tree:
    """Where model and optimizer lie in a state dict.

    Attributes:
        model: what stands before the name of a parameter, such as ``model.``.
        optimizer: what stands before ``state.`` and ``param_groups.``, such as ``optimizer.``. None: there is none.
        flat: names are parts of keys, as ``get_optimizer_state_dict`` makes them with ``flatten_optimizer_state_dict``.
        generic: keys of further tensors, which are their own names.
    """

    model: str = "model."
    optimizer: str | None = "optimizer."
    flat: bool = False
    generic: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, tensors: Iterable[str], others: Iterable[str]) -> Tree:
        """Return where model and optimizer lie, given the keys of tensors and of other values."""
        tensors, every = sorted(tensors), {*tensors, *others}
        optimizer = _optimizer_prefix(every)
        groups = "" if optimizer is None else optimizer + _GROUPS
        settings = [each[len(groups) :] for each in every if each.startswith(groups)]
        flat = optimizer is not None and not any(map(_GROUP.fullmatch, settings))
        return cls(_model_prefix(tensors, optimizer), optimizer, flat).over(tensors)

    def over(self, tensors: Iterable[str]) -> Tree:
        """Return this tree with those keys of tensors as generic that it cannot name."""
        keys = sorted(set(tensors) - self.generic)
        names = [self.name_of(key) for key in keys]
        repeated = {name for name, count in Counter(names).items() if count > 1}
        odd = {key for key, name in zip(keys, names, strict=True) if name in repeated or self.key_of(*name) != key}
        return replace(self, generic=self.generic | odd)

    @classmethod
    def joined(cls, trees: Iterable[Tree]) -> Tree:
        """Return one tree for ranks with several: of one that has seen an optimizer, and what any rank cannot name."""
        trees = list(trees)
        best = min(trees, key=lambda each: (each.optimizer is None, each.model, each.optimizer or "", each.flat))
        alike = (each.generic for each in trees if replace(each, generic=best.generic) == best)
        return replace(best, generic=frozenset().union(*alike))

    @classmethod
    def from_json(cls, value: Any) -> Tree:
        """Return the tree that ``as_json`` made. Malformed members get their defaults."""
        value = value if isinstance(value, Mapping) else {}
        model, optimizer, generic = value.get("model"), value.get("optimizer"), value.get("generic")
        return cls(
            model if isinstance(model, str) else "model.", optimizer if isinstance(optimizer, str) else None,
            bool(value.get("flat")), frozenset(map(str, generic)) if isinstance(generic, (list, tuple)) else frozenset(),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Return the form for the manifest."""
        return {"model": self.model, "optimizer": self.optimizer, "flat": self.flat, "generic": sorted(self.generic)}

    def name_of(self, key: str) -> Name:
        """Return name and state of the tensor with a key."""
        if key in self.generic:
            return key, WEIGHT
        state = None if self.optimizer is None else self.optimizer + _STATE
        if state is not None and key.startswith(state):
            name, _, part = key[len(state) :].rpartition(".")
            if name and part and not name.isdigit():
                return name, part
        elif key.startswith(self.model) and len(key) > len(self.model):
            return key[len(self.model) :], WEIGHT
        return key, WEIGHT

    def key_of(self, name: str, state: str) -> str:
        """Return the key of a tensor."""
        if name in self.generic:
            return name
        if state == WEIGHT:
            return self.model + name
        return f"{self.optimizer or ''}{_STATE}{name}.{state}"

    def path_of(self, name: str, state: str) -> Path:
        """Return the path of a tensor whose key is not generic."""
        if state == WEIGHT:
            return (*_parts(self.model), name)
        under = (f"{_STATE}{name}.{state}",) if self.flat else ("state", name, state)
        return (*_parts(self.optimizer or ""), *under)

    def path_of_key(self, key: str) -> Path:
        """Return the path of a key that is not generic, as programs have it whose values lie where the tree says."""
        setting = self.setting_of(key)
        if setting is not None and self.flat:
            return (*_parts(self.optimizer or ""), f"{_GROUPS}{setting[0]}.{setting[1]}")
        return self.path_of(*self.name_of(key))

    def is_state(self, key: str) -> bool:
        """Whether a key is that of a state of the optimizer."""
        return self.optimizer is not None and key.startswith(self.optimizer + _STATE) and self.name_of(key)[1] != WEIGHT

    def setting_of(self, key: str) -> tuple[str, str] | None:
        """Return the parameter, or the number of a group, and the setting of a key of ``param_groups``; None of another key."""
        if self.optimizer is None or not key.startswith(self.optimizer + _GROUPS):
            return None
        rest = key[len(self.optimizer + _GROUPS) :]
        found = None if self.flat else _GROUP.fullmatch(rest)
        if found is not None:
            return found[1], found[2]
        name, _, setting = rest.rpartition(".")
        return (name, setting) if name and self.flat else None


def _parts(prefix: str) -> Path:
    return tuple(prefix.rstrip(".").split(".")) if prefix else ()


def _optimizer_prefix(keys: Collection[str]) -> str | None:
    """Return what stands before ``state.`` and ``param_groups.`` of an optimizer by name, or None."""
    groups = {key[: at.start() + len(at[0])] for key in keys for at in re.finditer(r"(?:^|(?<=\.))(?=param_groups\.)", key)}
    counts: Counter[str] = Counter()
    for key in keys:
        for prefix in groups:
            if key.startswith(prefix + _STATE):
                counts[prefix] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], prefix)) if counts else min(groups, default=None)


def _model_prefix(tensors: Collection[str], optimizer: str | None) -> str:
    """Return what stands before the names of the parameters."""
    state = None if optimizer is None else optimizer + _STATE
    stepped = {key[len(state) :].rpartition(".")[0] for key in tensors if state is not None and key.startswith(state)}
    rest = [key for key in tensors if state is None or not key.startswith(state)]
    counts: Counter[str] = Counter()
    for key in rest:
        parts = key.split(".")
        for at in range(len(parts)):
            if ".".join(parts[at:]) in stepped:
                counts[".".join((*parts[:at], ""))] += 1
                break
    if counts:
        under = {prefix: sum(key.startswith(prefix) for key in rest) for prefix in counts}
        return min(counts, key=lambda prefix: (-counts[prefix], -under[prefix], prefix not in _MODELS, len(prefix), prefix))
    return next((prefix for prefix in _MODELS if any(key.startswith(prefix) for key in rest)), "" if rest else "model.")
