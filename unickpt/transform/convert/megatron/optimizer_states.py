"""Assignment of optimizer states to parameters in Megatron's ``torch`` format, which has numbers or flat buffers.

See megatron/core/optimizer/optimizer.py (``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``, ``ChainedOptimizer``) and
distrib_optimizer.py. The assignment follows Megatron's order of parameters. It is accepted only if the numbers and shapes fit
and the weights are the cast of their masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import split_flat_range
from unickpt.checkpoint.format.casts import is_cast_of
from unickpt.transform.convert.megatron.common_state import OptimizerState, number, owners
from unickpt.transform.convert.megatron.flat_buffers import Member, layout
from unickpt.transform.convert.megatron.keys import MASTER, is_expert
from unickpt.transform.convert.megatron.torch_files import save_otherwise
from unickpt.transform.convert.parameter_order import NoOrderError, match_names
from unickpt.transform.convert.pickles.lazy_tensor import Located

_HALVES = ("BF16", "F16")
_SAMPLE = 2048  # elements compared at the begin, in the middle and at the end of a parameter
_STATES = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class RankParameter:
    """A parameter of a rank.

    Attributes:
        chunk: number of the model chunk.
        name: name in the chunk.
        weight: the weight.
        shared: as in ``Member``.
        bucket_size: number of elements after which a bucket ends, or None.
    """

    chunk: int
    name: str
    weight: Located
    shared: bool = False
    bucket_size: int | None = None

    @property
    def key(self) -> str:
        """Unique key of the parameter on its rank."""
        return f"{self.chunk}/{self.name}"


@dataclass(frozen=True)
class ParameterStates:
    """Optimizer states of a parameter.

    Attributes:
        parameter: owning parameter.
        states: optimizer tensors by key, in the shape of the parameter.
        group: parameter group index, or -1.
        step: step, or None.
    """

    parameter: RankParameter
    states: Mapping[str, Located]
    group: int
    step: float | None


def agrees(weight: Located, master: Located) -> bool:
    """Return whether a weight is the cast of a master, by a sample of its elements (all elements of a small tensor)."""
    if weight.shape != master.shape:
        return False
    n = weight.numel
    starts = sorted({0, max(n // 2 - _SAMPLE // 2, 0), max(n - _SAMPLE, 0)})
    boxes = [box for lo in starts for box in split_flat_range(weight.shape, lo, min(lo + _SAMPLE, n))]
    return all(is_cast_of(weight.read(box), master.read(box)) for box in boxes)


def is_distributed(leaf: OptimizerState) -> bool:
    """Return whether the states of an optimizer are in the separate file of distributed optimizers."""
    inner = leaf.tree.get("optimizer", leaf.tree)
    return "state" not in inner


def group_numbers(leaf: OptimizerState, parameters: Sequence[RankParameter]) -> Mapping[str, int] | None:
    """Return the group of every parameter by its ``key``, or None if the groups are not Megatron's default."""
    known = {each.key: (len(each.weight.shape), is_expert(each.name)) for each in parameters}
    return owners(leaf.groups, known)


# ---------------------------------------------------------------- numbered states


@dataclass(frozen=True)
class _Numbered:
    states: Mapping[str, Located]
    step: float | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return next((each.shape for each in self.states.values()), None)


def numbered_states(leaf: OptimizerState, parameters: Sequence[RankParameter], path: Path) -> list[ParameterStates]:
    """Return the states of an optimizer that is not distributed.

    Args:
        leaf: state of the optimizer.
        parameters: possible parameters, in the order of the model.
        path: path of the file, for messages.

    Raises:
        FormatError: no assignment of the numbers to the parameters fits, or several do.
    """
    members = _members(leaf, path)
    masters = _masters(leaf, path)
    by_key = {each.key: each for each in parameters}
    rule = group_numbers(leaf, parameters)
    try:
        if rule is not None:
            naming = [[key for key, group in rule.items() if group == at] for at in range(len(members))]
            try:
                return _assigned(naming, by_key, members, masters)
            except NoOrderError:
                pass  # for example because parameters are frozen; the search may find a unique assignment
        return _assigned(_searched(by_key, members, masters), by_key, members, masters)
    except NoOrderError as err:
        raise FormatError(
            f"{path}: the optimizer states have numbers instead of names, and {err}: {save_otherwise()}"
        ) from None


def _members(leaf: OptimizerState, path: Path) -> list[list[_Numbered]]:
    inner = leaf.tree.get("optimizer", leaf.tree)
    states = inner.get("state")
    if not isinstance(states, dict):
        raise FormatError(f"{path}: the optimizer states are a {type(states).__name__}, expected a dictionary")
    found = []
    for group in leaf.groups:
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
            raise FormatError(f"{path}: a group of the optimizer has the parameters {numbers!r:.80}, expected numbers")
        found.append([_member(states.get(each, {}), group, each, path) for each in numbers])
    return found


def _member(state: Any, group: Mapping[str, Any], at: int, path: Path) -> _Numbered:
    if not isinstance(state, dict):
        raise FormatError(f"{path}: the optimizer state of parameter {at} is {state!r:.80}, expected a dictionary")
    step = number(state.get("step", group.get("step")))
    tensors = {str(name): each for name, each in state.items() if isinstance(each, Located) and name != "step"}
    other = sorted(str(name) for name in state.keys() - tensors.keys() - {"step"} if state[name] is not None)
    if other:
        raise FormatError(f"{path}: the optimizer state {other[0]} of parameter {at} is not a tensor, which is not supported")
    return _Numbered(tensors, step if isinstance(step, (int, float)) else None)


def _masters(leaf: OptimizerState, path: Path) -> list[list[Located]]:
    """Return the masters of the 16-bit parameters in each group; none if the optimizer updates the weights directly."""
    masters = leaf.tree.get("fp32_from_fp16_params")
    if masters is None:
        return [[] for _ in leaf.groups]
    valid = isinstance(masters, list) and len(masters) == len(leaf.groups) and all(isinstance(each, list) for each in masters)
    if not valid or not all(isinstance(each, Located) for group in masters for each in group):
        raise FormatError(f"{path}: fp32_from_fp16_params is not a list of tensors for each of {len(leaf.groups)} groups")
    return [list(group) for group in masters]


def _searched(
    by_key: Mapping[str, RankParameter], members: Sequence[Sequence[_Numbered]], masters: Sequence[Sequence[Located]]
) -> list[list[str]]:
    """Return the keys of the members of each group, found by shapes, and by masters if every member has one."""
    paired = [len(group) == len(each) for group, each in zip(members, masters, strict=True)]
    shapes = []
    for at, group in enumerate(members):
        of_group = [masters[at][place].shape if paired[at] else each.shape for place, each in enumerate(group)]
        shapes.append([shape for shape in of_group if shape is not None])
        if len(shapes[-1]) != len(group):
            raise NoOrderError("some parameters have no states, so their shapes are unknown")

    def fits(name: str, group: int, place: int) -> bool:
        return not paired[group] or agrees(by_key[name].weight, masters[group][place])

    return match_names({key: each.weight.shape for key, each in by_key.items()}, shapes, fits)


def _assigned(
    naming: Sequence[Sequence[str]],
    by_key: Mapping[str, RankParameter],
    members: Sequence[Sequence[_Numbered]],
    masters: Sequence[Sequence[Located]],
) -> list[ParameterStates]:
    """Return the states of each parameter under an assignment of keys. Raises NoOrderError if something contradicts it."""
    found = []
    for at, (keys, group) in enumerate(zip(naming, members, strict=True)):
        if len(keys) != len(group):
            raise NoOrderError(f"group {at} has {len(group)} parameters, but the model has {len(keys)}")
        left = list(masters[at])
        for key, member in zip(keys, group, strict=True):
            parameter = by_key[key]
            states = dict(member.states)
            if masters[at] and parameter.weight.dtype in _HALVES:
                if not left or not agrees(parameter.weight, left[0]):
                    raise NoOrderError(f"{parameter.name} is not the cast of its supposed master")
                states[MASTER] = left.pop(0)
            if any(each.shape != parameter.weight.shape for each in states.values()):
                raise NoOrderError(f"{parameter.name} has another shape than its supposed states")
            found.append(ParameterStates(parameter, states, at, member.step))
        if left:
            raise NoOrderError(f"group {at} has {len(left)} more masters than 16-bit parameters")
    return found


# ---------------------------------------------------------------- flat buffers


def flat_states(leaf: OptimizerState, buffers: Any, parameters: Sequence[RankParameter], path: Path) -> list[ParameterStates]:
    """Return the states of a distributed optimizer.

    Args:
        leaf: state of the optimizer, which has only hyperparameters.
        buffers: its part of ``distrib_optim.pt``.
        parameters: all its parameters, in the order of the model.
        path: path of that file, for messages.

    Raises:
        FormatError: the buffers do not have the layout that follows from the arguments, or have an unknown form.
    """
    wanted = _by_buffer(parameters)
    found = _buffers(buffers, path)
    if len(found) != len(wanted):
        raise _layout_error(path, f"has {len(found)} buffers, the parameters of the model need {len(wanted)}")
    groups = group_numbers(leaf, parameters)
    step = leaf.steps[0] if leaf.steps else None
    held = []
    for at, (members, tensors) in enumerate(zip(wanted, found, strict=True)):
        sizes = [Member(each.weight.numel, each.shared) for each in members]
        places, total = layout(sizes, members[0].bucket_size)
        odd = next((f"{name} has {each.numel:,}" for name, each in tensors.items() if each.numel != total), None)
        if odd is not None:
            raise _layout_error(path, f"{odd} elements in buffer {at}, the parameters of the model need {total:,}")
        _check_gaps(tensors["param"], places, sizes, path)
        for member, place in zip(members, places, strict=True):
            shape = member.weight.shape
            states = {
                _STATES[name]: each.narrow(place, place + member.weight.numel).view(shape) for name, each in tensors.items()
            }
            if not agrees(member.weight, states[MASTER]):
                raise _layout_error(path, f"{member.name} is not the cast of the values at element {place:,} of buffer {at}")
            held.append(ParameterStates(member, states, -1 if groups is None else groups[member.key], step))
    return held


def _by_buffer(parameters: Sequence[RankParameter]) -> list[list[RankParameter]]:
    """Return the parameters of each buffer: one buffer per chunk and dtype, in the order of their first parameters."""
    found: dict[tuple[int, str], list[RankParameter]] = {}
    for each in parameters:
        found.setdefault((each.chunk, each.weight.dtype), []).append(each)
    return list(found.values())


def _buffers(value: Any, path: Path) -> list[Mapping[str, Located]]:
    """Return the flat tensors of every buffer."""
    if not isinstance(value, dict) or value.get("buckets_coalesced") is not True:
        raise _layout_error(path, "has the states bucket by bucket, the form of older releases")
    found: list[Mapping[str, Located]] = []
    for key in sorted(key for key in value if type(key) is int):
        inner = list(value[key].values()) if isinstance(value[key], dict) else []
        tensors = {name: inner[0].get(name) for name in _STATES} if len(inner) == 1 and isinstance(inner[0], dict) else {}
        flat_ones = {name: each for name, each in tensors.items() if isinstance(each, Located) and len(each.shape) == 1}
        if len(flat_ones) != len(_STATES):
            raise _layout_error(path, f"buffer {key} does not have one flat tensor for each of {', '.join(_STATES)}")
        found.append(flat_ones)
    return found


def _check_gaps(tensor: Located, places: Sequence[int], sizes: Sequence[Member], path: Path) -> None:
    """Check that the gaps between parameters are zero."""
    at = 0
    for place, size in sorted(zip(places, (each.numel for each in sizes), strict=True)):
        if place > at and tensor.narrow(at, place).read().any():
            raise _layout_error(path, f"elements {at:,} to {place:,} are padding but not zero")
        at = place + size


def _layout_error(path: Path, what: str) -> FormatError:
    return FormatError(
        f"{path}: {what}. The file does not contain the positions of the parameters, and those that follow from the arguments "
        f"do not fit; {save_otherwise()}"
    )
