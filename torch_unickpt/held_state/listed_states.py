"""Lists of tensors in the state of an optimizer, such as the directions of LBFGS, as one state for each tensor. Pure functions.

The list ``old_dirs`` becomes the states ``old_dirs[0]``, ``old_dirs[1]``, ..., and ``old_dirs[]`` has the rest of it: ``True``
in the place of a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

_LIST = "[]"  # ends the key of what is no tensor


def _is_listed(value: Any) -> bool:
    """Whether a state is a list of tensors, or of tensors and nothing."""
    return (
        type(value) is list
        and any(isinstance(each, torch.Tensor) for each in value)
        and all(isinstance(each, torch.Tensor) or each is None or each == [] for each in value)
    )


def flat(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state of an optimizer without lists of tensors: the same object if it has none."""
    if list not in map(type, state.values()):
        return state
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not _is_listed(value):
            found[key] = value
            continue
        found[f"{key}{_LIST}"] = [True if isinstance(each, torch.Tensor) else each for each in value]
        found |= {f"{key}[{at}]": each for at, each in enumerate(value) if isinstance(each, torch.Tensor)}
    return found


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``flat`` was made of."""
    found: dict[str, Any] = dict(state)
    for key, marks in state.items():
        if key.endswith(_LIST) and isinstance(marks, list):
            name = key.removesuffix(_LIST)
            del found[key]
            found[name] = [found.pop(f"{name}[{at}]") if mark is True else mark for at, mark in enumerate(marks)]
    return found


def missing(scalars: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return the tensors of lists that neither ``scalars`` nor ``keys`` have."""
    lists = [(key.removesuffix(_LIST), marks) for key, marks in scalars.items() if key.endswith(_LIST)]
    every = [f"{name}[{at}]" for name, marks in lists for at, mark in enumerate(marks) if mark is True]
    return [each for each in every if each not in scalars and each not in keys]
