"""What Megatron's checkpoints hold beside tensors, whatever their form: arguments, counters, groups of the optimizer.

megatron/training/checkpointing.py (``generate_state_dict``) and megatron/core/optimizer. It becomes what the Megatron adapter
would have written of the same job (megatron_unickpt/capture.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt import __version__, objects
from unickpt.foreign.located import Located
from unickpt.foreign.pickles import Record
from unickpt.foreign.plain import members, plain
from unickpt.language.facts import Model
from unickpt.manifest import Writer

DIALECT = "megatron-core"
GROUPS_NOT_TOLD = (
    "which parameter is in which group of the optimizer: the groups are not Megatron's usual ones, and the files do not tell"
)
Told = Callable[[str], None]

_CONTENT = "content_metadata"
# By which Megatron tells groups apart (``_filter_and_reorder_param_groups``).
_IDENTITY = ("wd_mult", "is_expert_parallel")
_SIZES = {
    "world_size": "world_size", "tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size", "context": "context_parallel_size",
    "expert": "expert_model_parallel_size", "expert_tensor": "expert_tensor_parallel_size", "data": "data_parallel_size",
}  # fmt: skip
# The adapter's own mark of optimizers that have described themselves by parameter (megatron_unickpt/optimizer.py).
_BY_PARAMETER = {"unickpt": True, "distrib_optim_sharding_type": "fully_sharded_model_space"}


@dataclass(frozen=True)
class Leaf:
    """One of the optimizers of a job. Attributes: its state dict; groups; their steps, as far as told; state of the scaler."""

    tree: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[float]
    grad_scaler: Any


def leaves(tree: Any) -> Iterator[Leaf]:
    """The optimizers of a state dict: it is one, a list of them, or a dict by number."""
    if isinstance(tree, list):
        for each in tree:
            yield from leaves(each)
        return
    if not isinstance(tree, dict):
        return
    inner = tree.get("optimizer", tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        states = inner.get("state")
        told = [states.get("common_step")] if isinstance(states, dict) else []
        steps = [number(step) for step in (*told, *(group.get("step") for group in groups))]
        yield Leaf(tree, groups, [step for step in steps if isinstance(step, (int, float))], tree.get("grad_scaler"))
        return
    for key in sorted(key for key in tree if isinstance(key, int)):
        yield from leaves(tree[key])


def number(value: Any) -> Any:
    """A tensor of one element as a number; anything else as it is."""
    return value.read().item() if isinstance(value, Located) and value.numel == 1 else value


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group, what is neither its parameters nor its step."""
    return {str(key): value for key, value in group.items() if key not in ("params", "step")}


def encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of hyperparameters, those that are plain."""
    found = {}
    for key, value in values.items():
        each = objects.encode(number(value), prefix="optimizer")
        if not each.tensors and not each.opaque:
            found[key] = each.value
    return found


def name_of_optimizer(states: set[str], groups: Sequence[Mapping[str, Any]]) -> str:
    """The class of the optimizer, which the files do not tell: by its states, and by keys that only fused ones have."""
    if {"exp_avg", "exp_avg_sq"} <= states:
        return "FusedAdam" if any("bias_correction" in group for group in groups) else "AdamW"
    return "SGD" if "momentum_buffer" in states else "unknown"


def dimensions(name: str, shape: Sequence[int]) -> int:
    """Of the parameter itself: layers of one kind, and experts, are stacked (transformer_block.py, moe/experts.py)."""
    stacked = len(re.findall(r"(?:^|\.)layers\.(?!\d+\.)", name)) + (".experts.experts." in name)
    return len(shape) - stacked


def owners(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, tuple[int, bool]]) -> dict[str, int] | None:
    """The group of every parameter, by number, if the groups are those of the default.

    By default biases and what has one dimension have no weight decay, and experts are apart
    (megatron/core/optimizer/__init__.py, ``_get_param_groups`` and ``get_standard_config_overrides``).

    Args:
        groups: their hyperparameters.
        parameters: of each its dimensions, and whether it is an expert's.

    Returns:
        None if the groups are others.
    """
    identities = [tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY) for group in groups]
    numbers = {identity: at for at, identity in enumerate(identities)}
    if parameters and len(numbers) != len(groups):
        return None
    apart = any(expert for _, expert in numbers)
    found = {}
    for name, (ndim, expert) in parameters.items():
        decays = ndim > 1 and not name.endswith(".bias")
        at = numbers.get((1.0 if decays else 0.0, apart and expert))
        if at is None:
            return None
        found[name] = at
    return found


def arguments_of(common: Mapping[str, Any], told: Told) -> argparse.Namespace | None:
    """The scripts' arguments, as far as they are plain; ``told`` of the others."""
    found = common.get("args")
    if not isinstance(found, Record) or found.kind != "argparse.Namespace":
        return None
    made = argparse.Namespace()
    vars(made).update(members({str(key): value for key, value in found.state.items()}, "args", told))
    return made


def writer_of(arguments: argparse.Namespace | None) -> Writer:
    """For the manifest: who has written it, under which parallel sizes."""
    sizes = {name: getattr(arguments, argument, None) for name, argument in _SIZES.items()}
    topology = {name: size for name, size in sizes.items() if type(size) is int}
    return Writer("megatron", "", __version__, torch.__version__, DIALECT, topology, Model.of_megatron(arguments).as_json())


def step_of(common: Mapping[str, Any]) -> int:
    """The iteration; 0 if it is not told."""
    step = common.get("iteration", 0)
    return step if type(step) is int and step >= 0 else 0


def content_of(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``dist_checkpointing`` says of its own checkpoints."""
    found = common.get(_CONTENT)
    return found if isinstance(found, dict) else {}


def objects_of(
    common: Mapping[str, Any], arguments: argparse.Namespace | None, optimizers: Sequence[Leaf], trained: bool, told: Told
) -> dict[str, Any]:
    """Megatron's common state as the adapter keeps it: without the optimizer, which is told by parameter."""
    rest = {key: value for key, value in common.items() if key not in ("args", "optimizer")}
    found = members(rest, "", told)
    if arguments is not None:
        found["args"] = arguments
    if trained:
        found[_CONTENT] = {**content_of(common), **_BY_PARAMETER}
    scalers = [leaf.grad_scaler for leaf in optimizers if leaf.grad_scaler]
    return {"common": found, "grad_scaler": plain(scalers[0], "grad_scaler") if scalers else None}
