"""Hyperparameters and scalar states of an optimizer, as the manifest has them by parameter. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch

from unickpt.checkpoint.format import objects
from unickpt.checkpoint.format.dtypes import name_of, torch_dtype
from unickpt.checkpoint.format.manifest import ParameterGroup, merge_groups

LEFT_OUT = "the job that saved it had a value that no checkpoint stores: this job keeps its own"  # for the report

# Switches of the implementation and DeepSpeed's own bookkeeping. They are not restored.
NOT_HYPERPARAMETERS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "name", "moe", "_ds_source_param_group_id"}
)
_DECORATIONS = ("hybrid", "deepspeedcpu", "zenflow", "cpu", "fused")
_FAMILIES = {"adamw": "adam"}
_SAME_MEANING: Mapping[str, frozenset[str]] = {  # families whose state of this key is the same mean of the gradients
    "exp_avg": frozenset(("adam", "nadam", "radam", "adamax", "lamb")),
    "exp_avg_sq": frozenset(("adam", "nadam", "radam", "lamb")),
}


def encoded(
    values: Mapping[str, Any], parameters: Iterable[str] = (), *, typed: bool = True, repeated: tuple[str, ...] = ()
) -> ParameterGroup:
    """Return the values of a group. A one-element tensor, such as a capturable learning rate, is stored as a number.

    A value that cannot be encoded does not fail the save. It is named in ``left_out``: the save warns of it, and a load reports
    it and keeps the job's own.

    Args:
        values: by key.
        parameters: names of the parameters. A name counts once.
        typed: record dtype, shape and device of the tensors. False: a load takes all values as numbers.
        repeated: as in ``ParameterGroup``.
    """
    plain: dict[str, Any] = {}
    left_out: list[str] = []
    single = {k: v for k, v in values.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
    for key, value in values.items():
        found = objects.encode(value.item() if key in single else value, prefix="optimizer")
        if found.tensors or found.opaque:
            left_out.append(key)
        else:
            plain[key] = found.value
    kinds = {k: (name_of(v.dtype), tuple(v.shape), v.device.type) for k, v in single.items()} if typed else None
    return ParameterGroup(plain, tuple(dict.fromkeys(parameters)), kinds, repeated, tuple(left_out))


def grouped(values: Mapping[str, Mapping[str, Any]]) -> tuple[ParameterGroup, ...]:
    """Return the values of each parameter as groups of parameters with equal values, without the types of tensors."""
    return merge_groups(encoded(held, (name,), typed=False) for name, held in values.items())


def decoded(group: ParameterGroup, *, where: str, device: torch.device | None = None) -> dict[str, Any]:
    """Return the values of a group.

    Args:
        group: the group.
        where: name of the checkpoint in messages.
        device: place of tensors that were on a device. None: all tensors become numbers.

    Raises:
        FormatError: a value is malformed.
    """
    values: dict[str, Any] = dict(objects.decode(group.hyperparameters, tensors={}, where=where).value)
    for key, (dtype, shape, place) in (group.tensors or {}).items() if device is not None else ():
        if key in values:
            on = torch.device("cpu") if place == "cpu" else device
            values[key] = torch.tensor(values[key], dtype=torch_dtype(dtype), device=on).reshape(shape)
    return values


def not_stored(groups: Iterable[ParameterGroup]) -> list[str]:
    """Return the keys that the job that saved could not store, sorted."""
    return sorted({key for group in groups for key in group.left_out})


def family_of(name: str) -> str:
    """Return the family of an optimizer class. A family has the same states: Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, ..."""
    plain = name.lower()
    for decoration in _DECORATIONS:
        plain = plain.removeprefix(decoration)
    return _FAMILIES.get(plain, plain)


def shared_states(saved: str, own: str) -> frozenset[str]:
    """Return the elementwise states that two optimizer classes of different families share, given their names."""
    families = {family_of(saved), family_of(own)}
    return frozenset(key for key, having in _SAME_MEANING.items() if families <= having)


def formed(existing: Any, value: Any) -> Any:
    """Return the checkpoint's value with the type of this job's value."""
    if not is_number(value):
        return value
    if isinstance(existing, torch.Tensor):
        with torch.no_grad():
            return existing.fill_(number_of(value))
    if isinstance(existing, float):
        return number_of(value)
    if isinstance(existing, int) and not isinstance(existing, bool):
        number = number_of(value)
        return int(number) if float(number).is_integer() else number
    return value


def copied(value: Any) -> Any:
    """Return a scalar, or a plain value, of its own."""
    if isinstance(value, (list, dict)):
        return deepcopy(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_number(value: Any) -> bool:
    """Whether a value is a number or a tensor."""
    return isinstance(value, (bool, int, float, torch.Tensor))


def number_of(value: Any) -> Any:
    """Return the number in a tensor of one element; another value as it is."""
    return value.item() if isinstance(value, torch.Tensor) else value


def with_value(values: Iterable[Any]) -> list[Any]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]
