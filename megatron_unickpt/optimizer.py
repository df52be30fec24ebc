"""Any of Megatron's optimizers as sharded tensors in model space, and back.

``DistributedOptimizer`` holds flat ranges of parameters. Its own checkpoints either keep the buckets
as they are (and load only under the same model parallel shape), or gather them. Here every range is
a few boxes of the parameter it lies in: each rank names what it holds, nothing is exchanged, and
the state of a plain or an fp32 optimizer has the same names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from megatron_unickpt import internals, mapping
from megatron_unickpt.internals import Held, Leaf
from megatron_unickpt.mapping import MASTER, StateTensor
from unickpt import objects
from unickpt.errors import MismatchError, UnsupportedLayoutError
from unickpt.fragments import boxes_of_view
from unickpt.manifest import OptimizerRecord, ParameterGroup

logger = logging.getLogger("unickpt")

# What tells a Megatron optimizer to describe itself this way. The sharding type that is named beside it is the
# one that Megatron lets pass under another model parallel shape; it is never used.
MARK = "unickpt"
METADATA = {MARK: True, "distrib_optim_sharding_type": "fully_sharded_model_space"}
PART = "unickpt"  # key of OptimizerPart in the optimizer's state dict
TENSORS = "unickpt_tensors"


@dataclass
class OptimizerPart:
    """Travels with the optimizer's state dict, from ``sharded_state_dict`` to ``load_state_dict``.

    Attributes:
        optimizer: whose state it is.
        leaves: what it holds on this rank.
        names: parameter (by id) -> names of the global tensors it is part of.
        described: parameters (by id) that this rank tells of when it saves: of which it holds the first copy of something.
        record: hyperparameters and step by parameter name; filled by a load.
        grad_scaler: state of the loss scaler; filled by a load, or to be saved.
        loaded: a load has filled the tensors.
        began: parameters that were frozen when the checkpoint was saved: their state begins here.
        notes: what the load has to say, for its report.
    """

    optimizer: Any
    leaves: list[Leaf]
    names: dict[int, tuple[str, ...]]
    described: frozenset[int] = frozenset()
    record: OptimizerRecord | None = None
    grad_scaler: Any = None
    loaded: bool = False
    began: frozenset[str] = frozenset()
    notes: list[tuple[str, str, str]] = field(default_factory=list)


def sharded_state_dict(optimizer: Any, model: Any, *, is_loading: bool) -> dict[str, Any]:
    """The optimizer's state as sharded tensors whose data are the live tensors themselves.

    Args:
        optimizer: any supported wrapper (``internals.unsupported_reason``).
        model: sharded state dict of the model, with its own parameters as data (``keep_vars``).
        is_loading: allocate states that do not exist yet.

    Returns:
        A dict for ``dist_checkpointing.save`` or ``load``, and then for the optimizer's own
        ``load_state_dict``.

    Raises:
        UnsupportedLayoutError: the optimizer, or the way a parameter is stored, is not supported.
    """
    reason = internals.unsupported_reason(optimizer)
    if reason:
        raise UnsupportedLayoutError(reason)
    leaves = internals.leaves(optimizer, allocate=is_loading)
    known = _by_parameter(model)
    names: dict[int, tuple[str, ...]] = {}
    tensors: dict[str, ShardedTensor] = {}
    described: set[int] = set()
    for leaf in leaves:
        for held in leaf.held:
            parts = _parts(held.parameter, known)
            if any(mapping.is_main(_replica(part.replica_id, held.instance)) for part in parts):
                described.add(id(held.parameter))
            names[id(held.parameter)] = tuple(dict.fromkeys(part.key for part in parts))
            for state, data in {MASTER: held.main, **held.states}.items():
                for item in _sharded(parts, held, state, data):
                    tensors[str(len(tensors))] = item
        for parameter in leaf.elsewhere:
            parts = _parts(parameter, known)
            names[id(parameter)] = tuple(dict.fromkeys(part.key for part in parts))
            for part in parts:
                tensors[str(len(tensors))] = _marker(part)
    scalers = [getattr(leaf.optimizer, "grad_scaler", None) for leaf in leaves]
    scaler = next((s for s in scalers if s), None)
    part = OptimizerPart(
        optimizer, leaves, names, frozenset(described), grad_scaler=None if scaler is None else scaler.state_dict()
    )
    return {PART: LocalNonpersistentObject(part), TENSORS: tensors}


def _by_parameter(model: Any) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """The model's sharded tensors and factories by the identity of their parameter; the first of several counts."""
    found: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for leaf in mapping.walk(model):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and leaf.data is not None:
            found.setdefault(id(leaf.data), leaf)
    return found


def _parts(parameter: torch.nn.Parameter, known: Mapping[int, ShardedTensor | ShardedTensorFactory]) -> list[ShardedTensor]:
    """The global tensors that a parameter is part of: one, or what its factory makes of it."""
    item = known.get(id(parameter))
    if item is None:
        raise UnsupportedLayoutError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model's sharded_state_dict does "
            "not have (make it with keep_vars=True)"
        )
    if isinstance(item, ShardedTensor):
        return [item]
    parts = [part for part in mapping.walk(item.build()) if isinstance(part, ShardedTensor)]
    storage = parameter.untyped_storage().data_ptr()
    if any(part.data is None or part.data.untyped_storage().data_ptr() != storage for part in parts):
        raise UnsupportedLayoutError(f"{item.key}: its factory copies the parameter instead of viewing it")
    return parts


def _replica(replica_id: int | tuple[int, ...], instance: int | None) -> int | tuple[int, ...]:
    """The last coordinate counts data parallel copies; of a range that one rank holds there is one per instance."""
    if instance is None:
        return replica_id
    return instance if isinstance(replica_id, int) else (*replica_id[:-1], instance)


def _sharded(parts: list[ShardedTensor], held: Held, state: str, data: torch.Tensor) -> Iterator[ShardedTensor]:
    """One state of a held range, as boxes of the global tensors."""
    flat = data.detach().view(-1)
    origin = held.parameter.storage_offset()
    for part in parts:
        view = held.parameter.detach() if part.data is held.parameter else part.data
        boxes = boxes_of_view(view.shape, view.stride(), view.storage_offset() - origin, held.lo, held.hi)
        for box, at in boxes:
            start = tuple(o + s for o, s in zip(part.global_offset[part.prepend_axis_num :], box.start, strict=True))
            live = flat.as_strided(box.shape, view.stride(), flat.storage_offset() + at - held.lo)
            yield StateTensor(
                mapping.key_of(part.key, state),
                live,
                live.dtype,
                box.shape,
                part.global_shape,
                (*part.global_offset[: part.prepend_axis_num], *start),
                axis_fragmentations=None,
                replica_id=_replica(part.replica_id, held.instance),
                prepend_axis_num=part.prepend_axis_num,
                allow_shape_mismatch=part.allow_shape_mismatch,
                replicated=held.instance is None,
            )


def _marker(part: ShardedTensor) -> ShardedTensor:
    """An empty sharded tensor: tells that other ranks hold the master of this weight, so that nobody stores the weight."""
    shape = (0,) * len(part.local_shape) if part.local_shape else part.local_shape
    return StateTensor(
        mapping.key_of(part.key, MASTER),
        torch.empty(shape, dtype=torch.float32),
        torch.float32,
        shape,
        part.global_shape,
        (0,) * len(part.global_offset),
        axis_fragmentations=None,
        replica_id=(1, 1, 1),
        prepend_axis_num=part.prepend_axis_num,
        allow_shape_mismatch=part.allow_shape_mismatch,
    )


# ---------------------------------------------------------------- hyperparameters


def record_of(part: OptimizerPart, *, alone: bool = True) -> OptimizerRecord | None:
    """Hyperparameters and step of the parameters on this rank, by name.

    Args:
        part: what it holds.
        alone: also of parameters that another rank tells of, and of groups without any.
    """
    groups: list[ParameterGroup] = []
    scalars: list[ParameterGroup] = []
    for leaf in part.leaves:
        by_group: dict[int, tuple[dict[str, Any], list[Held]]] = {}
        for held in leaf.held:
            by_group.setdefault(id(held.group), (held.group, []))[1].append(held)
        for group in leaf.inner.param_groups:
            members = [
                held for held in by_group.get(id(group), (group, []))[1] if alone or id(held.parameter) in part.described
            ]
            if not members and not alone:
                continue
            names = tuple(dict.fromkeys(n for held in members for n in part.names[id(held.parameter)]))
            values = {key: value for key, value in group.items() if key not in ("params", "step")}
            groups.append(ParameterGroup(_plain(values), names))
            by_value: dict[str, tuple[dict[str, Any], list[str]]] = {}
            for held in members:
                found = {**held.scalars}
                if "step" not in found and "step" in group:
                    found["step"] = group["step"]
                encoded = _plain(found)
                if encoded:
                    by_value.setdefault(repr(encoded), (encoded, []))[1].extend(part.names[id(held.parameter)])
            scalars += [ParameterGroup(values, tuple(dict.fromkeys(names))) for values, names in by_value.values()]
    if not part.leaves or not (alone or groups):
        return None
    return OptimizerRecord(type(part.leaves[0].inner).__name__, tuple(groups), tuple(scalars))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Encoded values, one-element tensors as numbers; what is neither is left out."""
    numbers = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in values.items()}
    plain = {}
    for key, value in numbers.items():
        encoded = objects.encode(value, prefix="optimizer")
        if not encoded.tensors and not encoded.opaque:
            plain[key] = encoded.value
    return plain


def load_state_dict(part: OptimizerPart) -> None:
    """After its tensors were filled: hyperparameters, step and loss scaler of the checkpoint into the optimizer.

    Raises:
        MismatchError: the tensors were not loaded by unickpt, or a parameter has no group in the checkpoint.
    """
    if not part.loaded:
        raise MismatchError("the optimizer's state dict was not filled by a unickpt load")
    for leaf in part.leaves:
        for held in leaf.held:
            internals.write_back(leaf, held)
        if part.record is not None:
            _set_hyperparameters(part, leaf)
        scaler = getattr(leaf.optimizer, "grad_scaler", None)
        if scaler and part.grad_scaler is not None:
            scaler.load_state_dict(part.grad_scaler)


def _set_hyperparameters(part: OptimizerPart, leaf: Leaf) -> None:
    assert part.record is not None
    groups = {name: group for group in part.record.groups for name in group.parameters}
    steps = {name: entry.hyperparameters for entry in part.record.scalars for name in entry.parameters}
    latest = max((float(s["step"]) for s in steps.values() if isinstance(s.get("step"), (int, float))), default=None)
    members: dict[int, list[str]] = {}
    for held in leaf.held:
        members.setdefault(id(held.group), []).extend(part.names[id(held.parameter)])
        found = next((steps[n] for n in part.names[id(held.parameter)] if n in steps), None)
        step = latest if found is None or "step" not in found else float(found["step"])
        if part.began.intersection(part.names[id(held.parameter)]):
            step = 0.0
        if internals.steps_per_parameter(leaf):
            internals.set_step(leaf, held, step or 0.0)
    for group in leaf.inner.param_groups:
        source = next((groups[n] for n in members.get(id(group), []) if n in groups), None) or _same_identity(
            part.record, group
        )
        if source is None:
            continue
        decoded = objects.decode(source.hyperparameters, tensors={}, where="optimizer group").value
        for key, value in decoded.items():
            if key in internals.SWITCHES:
                continue
            if key in group or key in ("max_lr", "min_lr", "lr"):
                group[key] = value
        if not internals.steps_per_parameter(leaf):
            named = [steps[n]["step"] for n in members.get(id(group), []) if n in steps and "step" in steps[n]]
            step = float(named[0]) if named else latest
            if step is not None:
                group["step"] = int(step)


def _same_identity(record: OptimizerRecord, group: Mapping[str, Any]) -> ParameterGroup | None:
    """The stored group that a group without parameters on this rank corresponds to, by Megatron's own keys for it."""

    def identity(values: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(values.get(key, values.get(f"pre_{key}")) for key in internals.IDENTIFIER_KEYS)

    return next((g for g in record.groups if identity(g.hyperparameters) == identity(group)), None)
