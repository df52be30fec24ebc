"""Converts the state of Megatron's optimizers to sharded tensors in model space, and back.

``DistributedOptimizer`` holds flat ranges of parameters. Megatron's own checkpoints either store its buckets, and then load
only with the same model parallel shape, or gather them. Here every range becomes a few boxes of its parameter. Ranks exchange
no data, and the states of all optimizer wrappers have the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.overrides import TorchFunctionMode

from megatron_unickpt.framework import optimizer_internals as internals
from megatron_unickpt.framework.optimizer_internals import HeldRange, Leaf
from megatron_unickpt.held_state import sharded_tensors
from megatron_unickpt.held_state.hyperparameters import Named, OptimizerPart, restore_hyperparameters
from megatron_unickpt.held_state.sharded_tensors import MASTER, LaterTensors, StateTensor
from unickpt.base.errors import MismatchError, UnsupportedLayoutError
from unickpt.checkpoint.format.boxes import Box, boxes_of_view
from unickpt.transform.convert.megatron import keys

METADATA = keys.BY_PARAMETER
"""Metadata that asks an optimizer for its state in model space, in the shapes of the parameters.

Megatron accepts this sharding type under another model parallel shape; it is not used otherwise.
"""
PART = "unickpt"  # key of OptimizerPart in the optimizer's state dict
TENSORS = "unickpt_tensors"


class MegatronsForm(dict[str, Any]):
    """The state dict of an optimizer in a form of Megatron, with what is needed to describe it by parameter instead.

    A copy or a pickle of it is a plain dict.

    Attributes:
        optimizer: Megatron's optimizer.
        model: the model's sharded tensors and factories by the id of their parameter.
    """

    def __init__(
        self, state: dict[str, Any], optimizer: Any, model: Mapping[int, ShardedTensor | ShardedTensorFactory]
    ) -> None:
        super().__init__(state)
        self.optimizer, self.model = optimizer, model

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (dict(self),)


def sharded_state_dict(optimizer: Any, model: Any, *, is_loading: bool, later: bool = False) -> dict[str, Any]:
    """Return the optimizer's state by parameter. ``model`` is the model's sharded state dict; see ``by_parameter``."""
    return by_parameter(optimizer, items_of(model), is_loading=is_loading, later=later)


def by_parameter(
    optimizer: Any, known: Mapping[int, ShardedTensor | ShardedTensorFactory], *, is_loading: bool, later: bool = False
) -> dict[str, Any]:
    """Return the optimizer's state as sharded tensors whose data are the live tensors.

    Args:
        optimizer: supported wrapper (``optimizer_internals.unsupported_reason``).
        known: the model's sharded tensors and factories by the id of their parameter.
        is_loading: allocate states that do not exist yet.
        later: describe the tensors when somebody looks at one. What is not supported is raised then.

    Returns:
        A dict for ``dist_checkpointing.save`` or ``load``, and then for the optimizer's ``load_state_dict``.

    Raises:
        UnsupportedLayoutError: the optimizer, or the way a parameter is stored, is not supported.
    """
    reason = internals.unsupported_reason(optimizer)
    if reason:
        raise UnsupportedLayoutError(reason)
    leaves = internals.leaves(optimizer, allocate=is_loading)
    described = cache(partial(_described, leaves, known))
    scalers = [getattr(leaf.optimizer, "grad_scaler", None) for leaf in leaves]
    scaler = next((s for s in scalers if s), None)
    part = OptimizerPart(
        optimizer,
        leaves,
        lambda: described()[0],
        grad_scaler=None if scaler is None else scaler.state_dict(),
        model=known,
        allocated=is_loading,
    )
    tensors = LaterTensors(lambda: described()[1])
    if not later:
        len(tensors)
    return {PART: LocalNonpersistentObject(part), TENSORS: tensors}


def _described(
    leaves: Sequence[Leaf], known: Mapping[int, ShardedTensor | ShardedTensorFactory]
) -> tuple[Named, dict[str, ShardedTensor]]:
    """Return the names of parameters, and the sharded tensors of their states."""
    names: dict[int, tuple[str, ...]] = {}
    tensors: dict[str, ShardedTensor] = {}
    described: set[int] = set()
    for leaf in leaves:
        for held in leaf.held:
            parts = _parts(held.parameter, known)
            if any(sharded_tensors.is_main(_replica(part.replica_id, held.instance)) for part in parts):
                described.add(id(held.parameter))
            names[id(held.parameter)] = tuple(dict.fromkeys(part.key for part in parts))
            for item in _states(parts, held):
                tensors[str(len(tensors))] = item
        for parameter in leaf.elsewhere:
            parts = _parts(parameter, known)
            names[id(parameter)] = tuple(dict.fromkeys(part.key for part in parts))
            for part in parts if parameter.numel() else ():
                tensors[str(len(tensors))] = _marker(part)
    return Named(names, frozenset(described)), tensors


def items_of(model: Any) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Return the model's sharded tensors and factories by the id of their parameter. Of several, the first one counts."""
    found: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for leaf in sharded_tensors.walk(model):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and leaf.data is not None:
            found.setdefault(id(leaf.data), leaf)
    return found


class _Uncopied(TorchFunctionMode):
    """Within this block ``contiguous`` returns the tensor itself.

    The factories of grouped experts transpose the weights, and copy the result: ``GroupedMLP`` has them as ``[input, output]``,
    and the checkpoint as ``[output, input]`` (transformer/moe/experts.py). Without the copy they are views of the parameter,
    whose strides say which elements a range of the parameter is.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))


def _parts(parameter: torch.nn.Parameter, known: Mapping[int, ShardedTensor | ShardedTensorFactory]) -> list[ShardedTensor]:
    """Return the global tensors that a parameter is part of: one, those that its factory builds, or its parts."""
    item = known.get(id(parameter))
    items = _within(parameter, known.values()) if item is None else [item]
    if not items:
        raise UnsupportedLayoutError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model's sharded_state_dict "
            "(call it with keep_vars=True, and pass all of it to optimizer.sharded_state_dict)"
        )
    return [part for item in items for part in _built(item, parameter)]


def _within(
    parameter: torch.nn.Parameter, known: Iterable[ShardedTensor | ShardedTensorFactory]
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Return the items whose data are together the whole parameter; none if there are no such items.

    TransformerEngine's grouped linear can have the weights of all experts of a rank in one parameter (single_grouped_weight).
    Its sharded state dict has a view for each expert (``_sharded_state_dict_grouped``).
    """
    begin, size = parameter.data_ptr(), parameter.numel() * parameter.element_size()
    found = [item for item in known if begin <= item.data.data_ptr() < begin + size]
    return found if sum(item.data.numel() for item in found) == parameter.numel() else []


def _built(item: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter) -> list[ShardedTensor]:
    if isinstance(item, ShardedTensor):
        return [item]
    with _Uncopied():
        parts = [part for part in sharded_tensors.walk(item.build()) if isinstance(part, ShardedTensor)]
    storage = parameter.untyped_storage().data_ptr()
    if any(part.data is None or part.data.untyped_storage().data_ptr() != storage for part in parts):
        raise UnsupportedLayoutError(
            f"{item.key}: its factory copies the parameter instead of viewing it, so the elements of a range "
            "of the parameter are not known. Let the factory return views (contiguous() is allowed), or save with a strategy "
            "of Megatron (torch_dist)"
        )
    return parts


def _replica(replica_id: int | tuple[int, ...], instance: int | None) -> int | tuple[int, ...]:
    """Return the replica id of a range. Its last coordinate counts data parallel copies, or distributed optimizer instances."""
    if instance is None:
        return replica_id
    return instance if isinstance(replica_id, int) else (*replica_id[:-1], instance)


def _states(parts: list[ShardedTensor], held: HeldRange) -> Iterator[ShardedTensor]:
    """Yield every state of a held range."""
    for state, data in {MASTER: held.main, **held.states}.items():
        yield from _sharded(parts, held, state, data)
    for state, data in held.others.items():
        yield _of_another_shape(parts, held, state, data)


def _of_another_shape(parts: list[ShardedTensor], held: HeldRange, state: str, data: torch.Tensor) -> ShardedTensor:
    """Return a state that is not elementwise, as a global tensor of its own shape.

    It belongs to the whole local parameter, so it loads where the parameter is divided in the same way. A parameter that is
    divided among ``n`` tensor parallel ranks has a leading dimension of ``n``: another ``n`` is another shape, which a load
    refuses.
    """
    part, count = parts[0], held.parameter.numel()
    stacked = part.prepend_axis_num
    whole = part.global_shape[stacked:]
    cut = [axis for axis, size in enumerate(whole) if size != part.local_shape[axis]]
    if (held.lo, held.hi) != (0, count):
        raise UnsupportedLayoutError(f"{part.key}: {state} {tuple(data.shape)} is not elementwise, and ranks hold parts of it")
    ways = math.prod(whole) // count
    if ways > 1 and len(cut) > 1:
        raise UnsupportedLayoutError(f"{part.key}: {state} {tuple(data.shape)} of a parameter that is divided in two ways")
    grid = (ways,) if ways > 1 else ()
    place = (part.global_offset[stacked + cut[0]] // part.local_shape[cut[0]],) if ways > 1 else ()
    return StateTensor(
        sharded_tensors.key_of(part.key, state),
        data.detach(),
        data.dtype,
        tuple(data.shape),
        (*part.global_shape[:stacked], *grid, *data.shape),
        (*part.global_offset[:stacked], *place, *(0,) * data.dim()),
        axis_fragmentations=None,
        replica_id=_replica(part.replica_id, held.instance),
        prepend_axis_num=stacked + len(grid),
        replicated=held.instance is None,
    )


def _sharded(parts: list[ShardedTensor], held: HeldRange, state: str, data: torch.Tensor) -> Iterator[ShardedTensor]:
    """Yield one state of a held range, as boxes of the global tensors."""
    own, data = held.parameter.detach(), data.detach()
    dense = own.is_contiguous() and data.is_contiguous()
    alike = dense or data.stride() == own.stride()
    hi = held.hi if dense else 1 + sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
    for part in parts:
        # Megatron's load of the weights gives the data of their description the prepended axes, too
        view = own if part.data is held.parameter else part.data.detach().view(part.local_shape)
        if alike:
            offset = int(view.storage_offset()) - int(own.storage_offset())
            boxes = boxes_of_view(view.shape, view.stride(), offset, held.lo, hi)
        elif view is own:
            boxes = [(Box.whole(own.shape), 0)]
        else:
            raise UnsupportedLayoutError(
                f"{part.key}: {state} has the strides {data.stride()}, and the parameter of which this is a part {own.stride()}"
            )
        if not boxes and state == MASTER and view.numel():
            yield _marker(part)  # it may have a name of its own, as gate and up have with ``singleton_local_shards``
        for box, at in boxes:
            start = tuple(o + s for o, s in zip(part.global_offset[part.prepend_axis_num :], box.start, strict=True))
            live = data.as_strided(box.shape, view.stride(), data.storage_offset() + at - held.lo) if alike else data
            yield StateTensor(
                sharded_tensors.key_of(part.key, state),
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
    """Return an empty sharded tensor, for a weight whose master is on other ranks. The weight itself is not stored."""
    shape = (0,) * len(part.local_shape) if part.local_shape else part.local_shape
    return StateTensor(
        sharded_tensors.key_of(part.key, MASTER),
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


def load_state_dict(part: OptimizerPart) -> None:
    """Set hyperparameters, steps and loss scaler of the checkpoint, after a load has filled the tensors.

    Raises:
        MismatchError: the tensors were not loaded by unickpt.
    """
    if not part.loaded:
        raise MismatchError("the optimizer's state dict was not filled by a unickpt load")
    for leaf in part.leaves:
        for held in leaf.held:
            internals.write_back(leaf, held)
        restore_hyperparameters(part, leaf)
        scaler = getattr(leaf.optimizer, "grad_scaler", None)
        if scaler:
            state = internals.new_scaler_state(leaf.optimizer) if part.grad_scaler is None else part.grad_scaler
            scaler.load_state_dict(state)
