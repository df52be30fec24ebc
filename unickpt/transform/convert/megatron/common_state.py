"""Common state of all checkpoint formats of Megatron: arguments, counters, parameter groups of the optimizer.

See ``generate_state_dict`` in megatron/training/checkpointing.py, and megatron/core/optimizer. The result equals what the
Megatron adapter writes for the same job (megatron_unickpt/dist_checkpointing/capture.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt import __version__
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.state.optimizer_record import encoded
from unickpt.checkpoint.format.manifest import Writer
from unickpt.transform.convert.megatron.keys import BY_PARAMETER, CONTENT_METADATA, DIALECT
from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.pickles.plain_values import members, plain
from unickpt.transform.convert.pickles.safe_pickle import Record
from unickpt.transform.dialects.model_facts import Model

GROUPS_UNKNOWN = (
    "assignment of parameters to the groups of the optimizer: the groups differ from Megatron's default, and the files do not "
    "contain the assignment"
)
Report = Callable[[str], None]  # receives one sentence

# Keys by which Megatron identifies groups (``_filter_and_reorder_param_groups``).
_IDENTITY = ("wd_mult", "is_expert_parallel")
_SIZES = {
    "world_size": "world_size",
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "data": "data_parallel_size",
}


@dataclass(frozen=True)
class OptimizerState:
    """State of one optimizer of a job.

    Attributes:
        tree: state dict.
        groups: parameter groups.
        steps: the steps that the state dict contains.
        grad_scaler: state of the gradient scaler, or None.
    """

    tree: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[float]
    grad_scaler: Any


def optimizers_in(tree: Any) -> Iterator[OptimizerState]:
    """Yield the optimizers in a state dict: one optimizer, a list, or a dictionary by number."""
    if isinstance(tree, list):
        for each in tree:
            yield from optimizers_in(each)
        return
    if not isinstance(tree, dict):
        return
    inner = tree.get("optimizer", tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        states = inner.get("state")
        common = [states.get("common_step")] if isinstance(states, dict) else []
        steps = [number(step) for step in (*common, *(group.get("step") for group in groups))]
        yield OptimizerState(tree, groups, [step for step in steps if isinstance(step, (int, float))], tree.get("grad_scaler"))
        return
    for key in sorted(key for key in tree if isinstance(key, int)):
        yield from optimizers_in(tree[key])


def number(value: Any) -> Any:
    """Return the number in a one-element tensor; other values are returned unchanged."""
    return value.read().item() if isinstance(value, Located) and value.numel == 1 else value


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group without its parameters and its step."""
    return {str(key): value for key, value in group.items() if key not in ("params", "step")}


def group_of(values: Mapping[str, Any], parameters: Iterable[str]) -> ParameterGroup:
    """Return the plain hyperparameters of parameters."""
    return encoded({key: number(value) for key, value in values.items()}, parameters, typed=False)


def name_of_optimizer(states: set[str], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the class name of the optimizer, from its states and from keys of fused optimizers. The files lack the name."""
    if {"exp_avg", "exp_avg_sq"} <= states:
        return "FusedAdam" if any("bias_correction" in group for group in groups) else "AdamW"
    return "SGD" if "momentum_buffer" in states else "unknown"


def dimensions(name: str, shape: Sequence[int]) -> int:
    """Return the number of dimensions of a parameter without the axes of stacked layers and experts.

    See transformer_block.py and moe/experts.py.
    """
    stacked = len(re.findall(r"(?:^|\.)layers\.(?!\d+\.)", name)) + (".experts.experts." in name)
    return len(shape) - stacked


def owners(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, tuple[int, bool]]) -> dict[str, int] | None:
    """Return the group number of every parameter under Megatron's default groups.

    By default biases and 1-D parameters have no weight decay, and experts have separate groups (``_get_param_groups`` and
    ``get_standard_config_overrides`` in megatron/core/optimizer/__init__.py).

    Args:
        groups: hyperparameters of each group.
        parameters: by name, the number of dimensions, and whether the parameter belongs to an expert.

    Returns:
        Group numbers by name, or None if the groups are not the default ones.
    """
    identities = [tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY) for group in groups]
    numbers = {identity: at for at, identity in enumerate(identities)}
    if parameters and len(numbers) != len(groups):
        return None
    separate_experts = any(expert for _, expert in numbers)
    found = {}
    for name, (ndim, expert) in parameters.items():
        decays = ndim > 1 and not name.endswith(".bias")
        at = numbers.get((1.0 if decays else 0.0, separate_experts and expert))
        if at is None:
            return None
        found[name] = at
    return found


def arguments_of(common: Mapping[str, Any], report: Report) -> argparse.Namespace | None:
    """Return the plain arguments of the training scripts, or None. ``report`` receives a sentence for every other argument."""
    found = common.get("args")
    if not isinstance(found, Record) or found.kind != "argparse.Namespace":
        return None
    made = argparse.Namespace()
    vars(made).update(members({str(key): value for key, value in found.state.items()}, "args", report))
    return made


def writer_of(arguments: argparse.Namespace | None) -> Writer:
    """Return the writer record, with the parallel sizes of the job."""
    sizes = {name: getattr(arguments, argument, None) for name, argument in _SIZES.items()}
    topology = {name: size for name, size in sizes.items() if type(size) is int}
    return Writer("megatron", "", __version__, torch.__version__, DIALECT, topology, Model.of_megatron(arguments).as_json())


def step_of(common: Mapping[str, Any]) -> int:
    """Return the iteration, or 0 if it is missing."""
    step = common.get("iteration", 0)
    return step if type(step) is int and step >= 0 else 0


def content_of(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content metadata of ``dist_checkpointing``, or an empty dictionary."""
    found = common.get(CONTENT_METADATA)
    return found if isinstance(found, dict) else {}


def objects_of(
    common: Mapping[str, Any],
    arguments: argparse.Namespace | None,
    optimizers: Sequence[OptimizerState],
    trained: bool,
    report: Report,
) -> dict[str, Any]:
    """Return Megatron's common state in the form of the adapter, without the optimizer, which is stored by parameter.

    Args:
        common: common state of the checkpoint.
        arguments: arguments of the job, or None.
        optimizers: optimizers of the job.
        trained: whether the checkpoint has optimizer states.
        report: receives a sentence for every value that is not converted.
    """
    rest = {key: value for key, value in common.items() if key not in ("args", "optimizer")}
    found = members(rest, "", report)
    if arguments is not None:
        found["args"] = arguments
    if trained:
        found[CONTENT_METADATA] = {**content_of(common), **BY_PARAMETER}
    scalers = [optimizer.grad_scaler for optimizer in optimizers if optimizer.grad_scaler]
    return {"common": found, "grad_scaler": plain(scalers[0], "grad_scaler") if scalers else None}
