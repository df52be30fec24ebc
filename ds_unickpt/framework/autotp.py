"""AutoTP: the part of each parameter on this rank. Uses private attributes of DeepSpeed.

Each layer that AutoTP replaces describes its parameters in an attribute (module_inject/layers.py): the affine map of
checkpoint/affine.py, or for a sliced ``nn.Embedding`` the sizes along one dimension. A parameter without the attribute is
whole on every rank. Experts of ``deepspeed.moe`` without ``enable_expert_tensor_parallelism`` are laid out whole among all
ranks, the tensor-parallel ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ds_unickpt.framework.internals import ExpertLayer, expert_layers, is_expert, layer_of, submodules
from ds_unickpt.placing.slices import Slice, Slices, local_shape
from unickpt.base.arrays import Shape
from unickpt.base.errors import FormatError
from unickpt.transform.convert.deepspeed.tensor_parallel import affine_boxes, split_boxes

META = "ds_autotp_universal_checkpoint_meta"
# Classes whose method ``_tp_partition`` divides parameters as their metadata state. The layers for GPT-2's Conv1D do not.
_DESCRIBED = frozenset(
    {
        "LinearAllreduce", "LinearLayer", "VocabParallelEmbedding", "HiddenParallelEmbedding", "SubParamColumnParallel",
        "SubParamLinearLayer", "SubParamLinearAllreduce", "Yuan_LinearAllreduce", "Yuan_LinearLayer",
    }
)  # fmt: skip


def degree(engine: Any) -> int:
    """Return the number of tensor-parallel ranks of AutoTP; 1 without AutoTP."""
    return max(int(engine.autotp_size()), 1)


def rank(engine: Any) -> int:
    """Return the tensor-parallel rank of this process; 0 without AutoTP."""
    if degree(engine) == 1:
        return 0
    return next((int(layer.tp_index) for _, layer in _layers(engine.module)), int(engine.get_tensor_parallel_rank()))


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from deepspeed.module_inject.layers import TensorParallel_Layer

    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, TensorParallel_Layer):
            yield name, child


def undescribed(engine: Any) -> str:
    """Return which layer of AutoTP does not describe its layout, as text; '' if all do, or without AutoTP."""
    if degree(engine) == 1:
        return ""
    try:
        import deepspeed.checkpoint.affine  # noqa: F401
    except ImportError:
        return "AutoTP of a DeepSpeed release that does not describe its layout (0.19.8 does)"
    for name, layer in _layers(engine.module):
        partition = type(layer)._tp_partition
        if partition.__module__ != "deepspeed.module_inject.layers" or _class_of(partition) not in _DESCRIBED:
            return f"the tensor-parallel layer {name} of class {type(layer).__name__}, which does not describe its layout"
    try:
        slices(engine)
    except FormatError as err:
        return f"a tensor-parallel layout that cannot be read: {err}"
    return ""


def _class_of(method: Any) -> str:
    name: str = method.__qualname__
    return name.split(".")[0]


def slices(engine: Any) -> Slices:
    """Return the part of each parameter on this rank.

    Raises:
        FormatError: the description of a parameter is missing or does not fit. The message names the parameter.
    """
    world = degree(engine)
    if world == 1:
        return Slices()
    own, layers = rank(engine), _expert_layers(engine)
    described = {id(p): layer for _, layer in _layers(engine.module) for p in layer.parameters(recurse=False)}
    found = {}
    for name, p in engine.module.named_parameters():
        layer = layer_of(name, layers) if is_expert(p) else None
        whole = layer is not None and not layer.slices
        found[id(p)] = Slice.whole(local_shape(p)) if whole else _slice(name, p, own, world, described.get(id(p)))
    return Slices(found)


def _expert_layers(engine: Any) -> dict[str, ExpertLayer]:
    children = submodules(engine.module) if engine.has_moe_layers else ()
    return {layer.name: layer for layer in expert_layers(children)} if children else {}


def divided_expert(engine: Any) -> str:
    """Return the name of a layer that AutoTP divides in an expert that DeepSpeed lays out whole; '' if there is none."""
    if degree(engine) == 1:
        return ""
    layers = _expert_layers(engine)
    inside = ((name, layer_of(name, layers)) for name, _ in _layers(engine.module))
    return next((name for name, layer in inside if layer is not None and not layer.slices), "")


def _slice(name: str, parameter: torch.nn.Parameter, rank: int, world: int, layer: Any) -> Slice:
    local = local_shape(parameter)
    meta: Any = getattr(parameter, META, None)
    if meta is None and layer is not None:  # an attribute of a parameter is lost in a copy
        layer._mark_uc_metadata()
        meta = getattr(parameter, META, None)
    if meta is None and layer is None:
        return Slice.whole(local, stored=rank == 0)
    where = f"{name} on tensor-parallel rank {rank} of {world}"
    try:
        reason = meta["conversion"]["unsupported_reason"]
        if reason:
            raise ValueError(reason)
        return _described(name, meta, local, rank, world, where)
    except (FormatError, KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        text = str(err) if isinstance(err, (FormatError, ValueError)) else f"{type(err).__name__}: {err}"
        raise FormatError(f"{where}: its attribute {META} does not describe its layout ({text})") from err


def _described(name: str, meta: Mapping[str, Any], local: Shape, rank: int, world: int, where: str) -> Slice:
    original: Shape = tuple(meta["original_shape"])
    entry = meta["conversion"].get("affine_map")
    if meta["replicated"]:
        if local != original:
            raise ValueError(f"it is replicated, but has shape {local} in place of {original}")
        boxes, view = Slice.whole(local).boxes, original
    elif entry is not None:
        if len(entry["ranks"]) != world:
            raise ValueError(f"it has {len(entry['ranks'])} ranks, expected {world}")
        boxes, view = affine_boxes(name, entry, rank, len(original), where), tuple(entry["logical_shape"])
    else:
        sizes, dim = [int(size) for size in meta["partition_sizes"]], int(meta["partition_dim"])
        if len(sizes) != world or sum(sizes) != original[dim]:
            raise ValueError(f"sizes {sizes} along dimension {dim} of shape {original}")
        boxes, view = split_boxes(original, [sizes], dim, rank), original
    if math.prod(view) != math.prod(original) or view[len(view) - len(original) + 1 :] != original[1:]:
        raise ValueError(f"logical shape {view} for shape {original}")
    if any(box.scale != 1.0 for box in boxes):
        raise ValueError("the ranks have multiples of its elements")
    held = sum(box.local.numel for box in boxes)
    beyond = any(stop > size for box in boxes for stop, size in zip(box.local.stop, local, strict=True))
    if held != math.prod(local) or beyond:
        raise ValueError(f"its boxes have {held} elements, its tensor has shape {local}")
    own = tuple(box for box in boxes if box.owner == rank)
    return Slice(original, local, tuple(boxes), own)
