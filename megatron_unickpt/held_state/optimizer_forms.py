"""The forms of an optimizer's state: by parameter, as ``optimizer`` describes it, or one of Megatron's own.

Megatron's distributed optimizer has several forms, which the caller selects with ``metadata``. A save stores every form by
parameter, and a load fills every form from there, because the state dict of a form of Megatron carries its optimizer
(``MegatronsForm``). A checkpoint has one of Megatron's forms only if that was lost on the way (the caller copied the dict), or
if an earlier release wrote it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

from megatron_unickpt.held_state import foreign_state, optimizer, sharded_tensors
from megatron_unickpt.held_state.common_state import COMMON
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.held_state.optimizer import PART, MegatronsForm
from megatron_unickpt.held_state.sharded_tensors import StateTensor
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.megatron import common_state
from unickpt.transform.convert.megatron.keys import WEIGHT, is_expert, tensor_of

_BUCKETS = "optimizer.distributed.dp_group_idx_"
_NAME = "dp_reshardable"  # of memory buckets since 0.15; before, "fully_sharded_bucket_space"
_TYPE = "param_state_sharding_type"  # of the distributed optimizer's state dict: the name of its form
BY_PARAMETER = (
    "Pass metadata=megatron_unickpt.METADATA to optimizer.sharded_state_dict, with is_loading=True when loading, and "
    "to the model's sharded_state_dict: it is then loaded by parameter, under every layout"
)
AGAIN = (
    "It loads under the layout that saved it, with the form that was saved (the same metadata in "
    "optimizer.sharded_state_dict). Load it so, and save it again, with metadata=megatron_unickpt.METADATA: then it "
    "loads under every layout"
)


class Form(enum.Enum):
    """Form of the optimizer's state in a checkpoint."""

    BY_PARAMETER = "by parameter, with hyperparameters and step by parameter"
    MEGATRONS = "tensors by parameter, with hyperparameters and step in the common state"
    BUCKETS = "memory buckets of a layout"
    NONE = "none"


def is_bucket(key: str) -> bool:
    """Whether a key names a memory buffer of a distributed optimizer, or an object that belongs to one."""
    return _BUCKETS in key


def form_of(checkpoint: Checkpoint) -> Form:
    """Return the form of the optimizer's state in a checkpoint."""
    if any(is_bucket(name) for name in (*(info.name for info in checkpoint.index.tensors), *checkpoint.shared_names())):
        return Form.BUCKETS
    if checkpoint.manifest.optimizer is not None or foreign_state.is_foreign(checkpoint):
        return Form.BY_PARAMETER
    stored = any(info.kind == "optimizer" for info in checkpoint.index.tensors)
    return Form.MEGATRONS if stored or any(common_state.optimizers_in(_common(checkpoint).get("optimizer"))) else Form.NONE


def _common(checkpoint: Checkpoint) -> Mapping[str, Any]:
    found = checkpoint.objects().value.get(COMMON)
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- state dicts


def to_save(tree: Any, known: Container[Any] = ()) -> Any:
    """Return a sharded state dict with every optimizer by parameter. Does not change the tree.

    Args:
        tree: the state dict.
        known: optimizers that an earlier save has described. Their tensors are described when somebody looks at one.

    Raises:
        UnsupportedLayoutError: a state cannot be described by parameter.
    """

    def described(found: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(found, MegatronsForm):
            return found
        return optimizer.by_parameter(found.optimizer, found.model, is_loading=False, later=found.optimizer in known)

    return _optimizers_mapped(tree, described)


def to_load(tree: Any, checkpoint: Checkpoint) -> Any:
    """Return a sharded state dict with every optimizer in the form that the checkpoint has, and with its states allocated.

    Does not change the tree.

    Raises:
        UnsupportedLayoutError: a state cannot be described by parameter.
    """
    form = form_of(checkpoint)
    stored = set(_types(_common(checkpoint).get("optimizer")))

    def described(found: dict[str, Any]) -> dict[str, Any]:
        if form is Form.BUCKETS:
            return _natively(found)
        if form is Form.NONE:
            return found
        if _is_megatrons(found):
            keep = form is Form.MEGATRONS and (set(_types(found)) == stored or record_of(checkpoint) is None)
            return found if keep else _by_parameter(found)
        return found if found[PART].obj.allocated else _by_parameter(found)

    return _optimizers_mapped(tree, described)


def natively(tree: Any) -> Any:
    """Return a sharded state dict with those optimizers in Megatron's form that the caller did not ask to describe otherwise.

    Does not change the tree. A collective for some forms.
    """
    return _optimizers_mapped(tree, _natively)


def _natively(found: dict[str, Any]) -> dict[str, Any]:
    native = None if _is_megatrons(found) else found[PART].obj.native
    state: dict[str, Any] = found if native is None else native()
    return state


def has_megatrons(tree: Any) -> bool:
    """Whether a sharded state dict has an optimizer in one of Megatron's forms."""
    if isinstance(tree, MegatronsForm):
        return True
    if isinstance(tree, dict):
        return any(map(has_megatrons, tree.values()))
    if isinstance(tree, list):
        return any(map(has_megatrons, tree))
    return isinstance(tree, ShardedTensor) and (is_bucket(tree.key) or tensor_of(tree.key)[1] != WEIGHT)


def _is_megatrons(found: dict[str, Any]) -> bool:
    return isinstance(found, MegatronsForm)


def _by_parameter(found: dict[str, Any]) -> dict[str, Any]:
    held = found if isinstance(found, MegatronsForm) else found[PART].obj
    return optimizer.by_parameter(held.optimizer, held.model, is_loading=True)


def _optimizers_mapped(tree: Any, function: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a tree with ``function`` applied to the state dict of every optimizer."""
    if isinstance(tree, dict):
        part = tree.get(PART)
        ours = isinstance(part, LocalNonpersistentObject) and isinstance(part.obj, OptimizerPart)
        if ours or isinstance(tree, MegatronsForm):
            return function(tree)
        mapped = {key: _optimizers_mapped(value, function) for key, value in tree.items()}
        return mapped if any(mapped[key] is not tree[key] for key in tree) else tree
    return tree


def _types(tree: Any) -> Iterator[str]:
    """Yield the names of the forms in the state dict of a distributed optimizer, or of several in a chain."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == _TYPE:
                yield str(value)
            elif key == "optimizer" or isinstance(key, int):
                yield from _types(value)


# ---------------------------------------------------------------- what a checkpoint has


def record_of(checkpoint: Checkpoint) -> OptimizerRecord | None:
    """Return hyperparameters and steps by parameter; None if the checkpoint has none, or does not have the assignment."""
    if checkpoint.manifest.optimizer is not None or form_of(checkpoint) is not Form.MEGATRONS:
        return checkpoint.manifest.optimizer
    optimizers = list(common_state.optimizers_in(sharded_tensors.mapped(_common(checkpoint).get("optimizer"), _number)))
    held = [common_state.hyperparameters(group) for each in optimizers for group in each.groups]
    states = {info.state for info in checkpoint.index.tensors if info.kind == "optimizer"}
    shapes = {info.name: info.shape for info in checkpoint.index.tensors if info.kind == "optimizer"}
    described = {name: (common_state.dimensions(name, shape), is_expert(name)) for name, shape in shapes.items()}
    owner_of = common_state.owners(held, described)
    steps = {step for each in optimizers for step in each.steps}
    if owner_of is None or len(steps) > 1 or not held:
        return None
    groups = tuple(
        common_state.group_of(values, (name for name in shapes if owner_of[name] == at)) for at, values in enumerate(held)
    )
    scalars = tuple(ParameterGroup({"step": step}, tuple(shapes)) for step in steps)
    return OptimizerRecord(common_state.name_of_optimizer(states, held), groups, scalars, stepped=bool(shapes))


def _number(leaf: Any) -> Any:
    """Return the number in a tensor of one element, and any other value as it is."""
    return leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf


def refusal(checkpoint: Checkpoint, items: Iterable[ShardedTensor]) -> str:
    """Return why an optimizer's state that is requested by parameter cannot be loaded, or ''."""
    if not any(isinstance(item, StateTensor) for item in items):
        return ""
    form = form_of(checkpoint)
    if form is Form.BUCKETS:
        return f"{_of_buckets(checkpoint)}. {AGAIN}"
    if form is Form.MEGATRONS and record_of(checkpoint) is None:
        return (
            "the hyperparameters and steps of the optimizer are stored for groups that differ from Megatron's default, without "
            f"the parameters of each group. {AGAIN}"
        )
    return ""


def _of_buckets(checkpoint: Checkpoint) -> str:
    tensors = (info.name for info in checkpoint.index.tensors if info.kind != "object")
    found = next(filter(is_bucket, (*tensors, *checkpoint.shared_names())))
    kind = next(iter(_types(_common(checkpoint).get("optimizer"))), _NAME)
    return (
        f"the state of the optimizer is stored in the form {kind} ({found}, ...): memory buckets of the layout that "
        f"saved it ({describe(checkpoint.manifest.writer.topology)}), without the positions of the parameters"
    )


def advice(checkpoint: Checkpoint, keys: Iterable[str]) -> str:
    """Return what to do if the checkpoint lacks these keys or has them in another shape; '' if none is of memory buckets."""
    if not any(map(is_bucket, keys)):
        return ""
    form = form_of(checkpoint)
    if form is Form.BUCKETS:
        return f"Of the optimizer: {_of_buckets(checkpoint)}. {AGAIN}"
    kept = "by parameter" if form in (Form.BY_PARAMETER, Form.MEGATRONS) else "not at all"
    return f"The state of the optimizer is asked for as memory buckets ({_NAME}), and is stored {kept}. {BY_PARAMETER}"
