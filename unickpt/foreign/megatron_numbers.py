"""Whose the states of Megatron's optimizers are, which its ``torch`` format keeps by number or as flat buffers.

megatron/core/optimizer/optimizer.py (``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``, ``ChainedOptimizer``) and
distrib_optimizer.py. Names come from Megatron's own rules of order; they count if everything fits that can be compared:
numbers, shapes, and that weights are the cast of their masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.dtypes import is_cast_of
from unickpt.errors import FormatError
from unickpt.foreign.located import Located
from unickpt.foreign.matching import NoOrderError, matched
from unickpt.foreign.megatron_buffers import Member, layout
from unickpt.foreign.megatron_files import save_otherwise
from unickpt.foreign.megatron_rules import is_expert
from unickpt.foreign.megatron_state import Leaf, number, owners
from unickpt.fragments import split_flat_range
from unickpt.megatron_keys import MASTER

_HALVES = ("BF16", "F16")
_SAMPLE = 2048  # elements, of the begin, the middle and the end of a parameter
_STATES = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank. Attributes: its chunk; name in that; the weight; shared, as of ``Member``; which buckets end."""

    chunk: int
    name: str
    weight: Located
    shared: bool = False
    bucket_size: int | None = None

    @property
    def key(self) -> str:
        """By which it is told from the rank's others."""
        return f"{self.chunk}/{self.name}"


@dataclass(frozen=True)
class Held:
    """What an optimizer has of a parameter. Attributes: it; states, in its shape; group, or -1; step, or None."""

    parameter: Parameter
    states: Mapping[str, Located]
    group: int
    step: float | None


def agrees(weight: Located, master: Located) -> bool:
    """Whether a weight is the cast of a master, as far as some elements of it show (all, of a small one)."""
    if weight.shape != master.shape:
        return False
    n = weight.numel
    starts = sorted({0, max(n // 2 - _SAMPLE // 2, 0), max(n - _SAMPLE, 0)})
    boxes = [box for lo in starts for box in split_flat_range(weight.shape, lo, min(lo + _SAMPLE, n))]
    return all(is_cast_of(weight.read(box), master.read(box)) for box in boxes)


def is_distributed(leaf: Leaf) -> bool:
    """Whether an optimizer keeps its states in the other file."""
    inner = leaf.tree.get("optimizer", leaf.tree)
    return "state" not in inner


def group_numbers(leaf: Leaf, parameters: Sequence[Parameter]) -> Mapping[str, int] | None:
    """The group of every parameter by its ``key``; None if the groups are not those of Megatron's default."""
    known = {each.key: (len(each.weight.shape), is_expert(each.name)) for each in parameters}
    return owners(leaf.groups, known)


# ---------------------------------------------------------------- by number


@dataclass(frozen=True)
class _Numbered:
    states: Mapping[str, Located]
    step: float | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return next((each.shape for each in self.states.values()), None)


def numbered(leaf: Leaf, parameters: Sequence[Parameter], path: Path) -> list[Held]:
    """What an optimizer has that is not distributed.

    Args:
        leaf: its state dict.
        parameters: those that it may have, in the order of the model.
        path: of the file, for messages.

    Raises:
        FormatError: there is no way to name its parameters, or more than one.
    """
    members = _members(leaf, path)
    masters = _masters(leaf, path)
    by_key = {each.key: each for each in parameters}
    rule = group_numbers(leaf, parameters)
    try:
        if rule is not None:
            naming = [[key for key, group in rule.items() if group == at] for at in range(len(members))]
            try:
                return _given(naming, by_key, members, masters)
            except NoOrderError:
                pass  # some are frozen, say; then there may be one way only
        return _given(_searched(by_key, members, masters), by_key, members, masters)
    except NoOrderError as err:
        raise FormatError(f"{path}: the optimizer's states have numbers for names, and {err}: {save_otherwise()}") from None


def _members(leaf: Leaf, path: Path) -> list[list[_Numbered]]:
    inner = leaf.tree.get("optimizer", leaf.tree)
    states = inner.get("state")
    if not isinstance(states, dict):
        raise FormatError(f"{path}: the optimizer's states are {type(states).__name__}, not a dictionary")
    found = []
    for group in leaf.groups:
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
            raise FormatError(f"{path}: a group of the optimizer has the parameters {numbers!r:.80}, not numbers")
        found.append([_member(states.get(each, {}), group, each, path) for each in numbers])
    return found


def _member(state: Any, group: Mapping[str, Any], at: int, path: Path) -> _Numbered:
    if not isinstance(state, dict):
        raise FormatError(f"{path}: the optimizer's state of parameter {at} is {state!r:.80}")
    step = number(state.get("step", group.get("step")))
    tensors = {str(name): each for name, each in state.items() if isinstance(each, Located) and name != "step"}
    other = sorted(str(name) for name in state.keys() - tensors.keys() - {"step"} if state[name] is not None)
    if other:
        raise FormatError(f"{path}: the optimizer's state {other[0]} of parameter {at} is no tensor; this is not known")
    return _Numbered(tensors, step if isinstance(step, (int, float)) else None)


def _masters(leaf: Leaf, path: Path) -> list[list[Located]]:
    """Of the parameters of 16 bits in each group; none of an optimizer that steps on the weights."""
    told = leaf.tree.get("fp32_from_fp16_params")
    if told is None:
        return [[] for _ in leaf.groups]
    whole = isinstance(told, list) and len(told) == len(leaf.groups) and all(isinstance(each, list) for each in told)
    if not whole or not all(isinstance(each, Located) for group in told for each in group):
        raise FormatError(f"{path}: fp32_from_fp16_params is not a list of tensors for each of {len(leaf.groups)} groups")
    return [list(group) for group in told]


def _searched(
    by_key: Mapping[str, Parameter], members: Sequence[Sequence[_Numbered]], masters: Sequence[Sequence[Located]]
) -> list[list[str]]:
    """By shapes, and by masters where every member has one."""
    paired = [len(group) == len(each) for group, each in zip(members, masters, strict=True)]
    shapes = []
    for at, group in enumerate(members):
        of_group = [masters[at][place].shape if paired[at] else each.shape for place, each in enumerate(group)]
        shapes.append([shape for shape in of_group if shape is not None])
        if len(shapes[-1]) != len(group):
            raise NoOrderError("some have no states, and so no shape")

    def fits(name: str, group: int, place: int) -> bool:
        return not paired[group] or agrees(by_key[name].weight, masters[group][place])

    return matched({key: each.weight.shape for key, each in by_key.items()}, shapes, fits)


def _given(
    naming: Sequence[Sequence[str]], by_key: Mapping[str, Parameter], members: Sequence[Sequence[_Numbered]],
    masters: Sequence[Sequence[Located]],
) -> list[Held]:  # fmt: skip
    """What each parameter has, if it has these names. Raises NoOrderError if anything contradicts them."""
    found = []
    for at, (keys, group) in enumerate(zip(naming, members, strict=True)):
        if len(keys) != len(group):
            raise NoOrderError(f"group {at} has {len(group)} parameters, where the model has {len(keys)}")
        left = list(masters[at])
        for key, member in zip(keys, group, strict=True):
            parameter = by_key[key]
            states = dict(member.states)
            if masters[at] and parameter.weight.dtype in _HALVES:
                if not left or not agrees(parameter.weight, left[0]):
                    raise NoOrderError(f"{parameter.name} is not the cast of what would be its master")
                states[MASTER] = left.pop(0)
            if any(each.shape != parameter.weight.shape for each in states.values()):
                raise NoOrderError(f"{parameter.name} has another shape than what would be its states")
            found.append(Held(parameter, states, at, member.step))
        if left:
            raise NoOrderError(f"group {at} has {len(left)} masters more than parameters of 16 bits")
    return found


# ---------------------------------------------------------------- in flat buffers


def flat(leaf: Leaf, buffers: Any, parameters: Sequence[Parameter], path: Path) -> list[Held]:
    """What a distributed optimizer has.

    Args:
        leaf: its state dict, which has hyperparameters only.
        buffers: its part of ``distrib_optim.pt``.
        parameters: all that it has, in the order of the model.
        path: of that file, for messages.

    Raises:
        FormatError: the buffers are not laid out as the arguments tell, or not in a known form.
    """
    wanted = _by_buffer(parameters)
    found = _buffers(buffers, path)
    if len(found) != len(wanted):
        raise _unfit(path, f"has {len(found)} buffers, where the model's parameters are in {len(wanted)}")
    groups = group_numbers(leaf, parameters)
    step = leaf.steps[0] if leaf.steps else None
    held = []
    for at, (members, tensors) in enumerate(zip(wanted, found, strict=True)):
        sizes = [Member(each.weight.numel, each.shared) for each in members]
        places, total = layout(sizes, members[0].bucket_size)
        odd = next((f"{name} has {each.numel:,}" for name, each in tensors.items() if each.numel != total), None)
        if odd is not None:
            raise _unfit(path, f"{odd} elements in buffer {at}, where the parameters of the model take {total:,}")
        _check_gaps(tensors["param"], places, sizes, path)
        for member, place in zip(members, places, strict=True):
            shape = member.weight.shape
            states = {
                _STATES[name]: each.narrow(place, place + member.weight.numel).view(shape) for name, each in tensors.items()
            }
            if not agrees(member.weight, states[MASTER]):
                raise _unfit(path, f"{member.name} is not the cast of what lies at element {place:,} of buffer {at}")
            held.append(Held(member, states, -1 if groups is None else groups[member.key], step))
    return held


def _by_buffer(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """One buffer for every chunk and type of weights, in the order of their first parameters."""
    found: dict[tuple[int, str], list[Parameter]] = {}
    for each in parameters:
        found.setdefault((each.chunk, each.weight.dtype), []).append(each)
    return list(found.values())


def _buffers(value: Any, path: Path) -> list[Mapping[str, Located]]:
    """The tensors of every buffer, all of them flat."""
    if not isinstance(value, dict) or value.get("buckets_coalesced") is not True:
        raise _unfit(path, "holds the states bucket by bucket, as older releases wrote them")
    found: list[Mapping[str, Located]] = []
    for key in sorted(key for key in value if type(key) is int):
        inner = list(value[key].values()) if isinstance(value[key], dict) else []
        tensors = {name: inner[0].get(name) for name in _STATES} if len(inner) == 1 and isinstance(inner[0], dict) else {}
        flat_ones = {name: each for name, each in tensors.items() if isinstance(each, Located) and len(each.shape) == 1}
        if len(flat_ones) != len(_STATES):
            raise _unfit(path, f"buffer {key} has not one flat tensor of each of {', '.join(_STATES)}")
        found.append(flat_ones)
    return found


def _check_gaps(tensor: Located, places: Sequence[int], sizes: Sequence[Member], path: Path) -> None:
    """What is between parameters was never written."""
    at = 0
    for place, size in sorted(zip(places, (each.numel for each in sizes), strict=True)):
        if place > at and tensor.narrow(at, place).read().any():
            raise _unfit(path, f"elements {at:,} to {place:,} would be padding, and are not zero")
        at = place + size


def _unfit(path: Path, what: str) -> FormatError:
    return FormatError(
        f"{path}: {what}. The file does not tell which parameter is where, and the order that the arguments lead to does not "
        f"fit; {save_otherwise()}"
    )
