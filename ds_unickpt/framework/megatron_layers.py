"""Tensor parallelism through an ``mpu``: the part of each parameter of the user's own layers on this rank.

Two sources tell how the ranks divide a parameter. ``universal_checkpoint_info`` of the module, a dict or a method as in
Megatron-DeepSpeed, has patterns of names (deepspeed/checkpoint/constants.py). The layers of Megatron set the attributes
``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` on their parameters. The ranks have equal parts, as in
Megatron. A parameter that neither source describes, or that both describe differently, is an error: a guess would be a wrong
checkpoint. DeepSpeed's own modules of a mixture of experts need no description. Experts need one if the tensor-parallel ranks
divide them (``enable_expert_tensor_parallelism``); otherwise each rank has whole experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import bwc

from ds_unickpt.framework import internals
from ds_unickpt.framework.internals import is_expert, is_zero3, layer_of, plain
from ds_unickpt.placing import megatron_deepspeed
from ds_unickpt.placing.slices import Slice, Slices, local_shape
from unickpt.base.arrays import Shape
from unickpt.base.errors import FormatError
from unickpt.transform.convert.deepspeed.patterns import Cut, cut_of
from unickpt.transform.convert.deepspeed.tensor_parallel import Division, affine_boxes, affine_entry, divided, merged

INFO = "universal_checkpoint_info"
_SHOWN = 16  # ranks of a group that a message names
_ADVICE = (
    "Set tensor_model_parallel=False on a parameter that all ranks hold alike, and tensor_model_parallel=True, partition_dim "
    f"and partition_stride on a divided one, as Megatron's layers do, or list it in {INFO} of the model"
)


def degree(engine: Any) -> int:
    """Return the number of tensor-parallel ranks of the job's ``mpu``; 1 without one, and with AutoTP."""
    mpu = None if int(engine.autotp_size()) > 1 else engine.mpu
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):  # DeepSpeed's mpu of Ulysses (utils/groups.py)
        return 1
    return int(bwc.bwc_tensor_model_parallel_world_size(mpu))


def rank(engine: Any) -> int:
    """Return the tensor-parallel rank of this process; 0 without tensor parallelism."""
    return int(bwc.bwc_tensor_model_parallel_rank(engine.mpu)) if degree(engine) > 1 else 0


def contradiction(engine: Any) -> str:
    """Return how the methods of the job's ``mpu`` contradict its process group on this rank, as text; '' if they agree.

    Calls no collective. An ``mpu`` that disagrees between ranks contradicts the group on at least one of them.
    """
    mpu = None if int(engine.autotp_size()) > 1 else engine.mpu
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        return ""
    group = bwc.bwc_tensor_model_parallel_group(mpu)
    if not isinstance(group, torch.distributed.ProcessGroup):
        return ""
    ranks, own = torch.distributed.get_process_group_ranks(group), int(engine.global_rank)
    told = int(bwc.bwc_tensor_model_parallel_rank(mpu)), int(bwc.bwc_tensor_model_parallel_world_size(mpu))
    true = ranks.index(own) if own in ranks else -1, len(ranks)
    if told == true:
        return ""
    return (
        f"an mpu that contradicts itself: on rank {own} it is tensor-parallel rank {told[0]} of {told[1]}, but its group has "
        f"{true[1]} ranks ({', '.join(map(str, ranks[:_SHOWN]))}), of which rank {own} is "
        f"{f'number {true[0]}' if true[0] >= 0 else 'none'}. Correct the methods of the mpu, then save or load again"
    )


def undescribed(engine: Any) -> str:
    """Return which parameter has no known layout, as text; '' if all have one, or without an ``mpu``."""
    if degree(engine) == 1:
        return ""
    try:
        slices(engine)
    except FormatError as err:
        return f"a tensor-parallel layout that cannot be read: {err}"
    return ""


def info_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return ``universal_checkpoint_info`` of a module; empty if it has none.

    Raises:
        FormatError: it is not a dict, or the method that makes it fails.
    """
    found: Any = getattr(module, INFO, None)
    try:
        found = found() if callable(found) else found
    except Exception as err:
        raise FormatError(f"{type(module).__name__}.{INFO} fails ({type(err).__name__}: {err})") from err
    if found is not None and not isinstance(found, Mapping):
        raise FormatError(f"{type(module).__name__}.{INFO} is a {type(found).__name__}, expected a dict")
    return found or {}


def slices(engine: Any) -> Slices:
    """Return the part of each parameter on this rank. Calls no collective.

    Raises:
        FormatError: the layout of a parameter is unknown or does not fit its shape. The message names the parameter.
    """
    world = degree(engine)
    if world == 1:
        return Slices()
    own, info, known = rank(engine), info_of(engine.module), megatron_deepspeed.job_of(engine.module)
    named = [(plain(name), p) for name, p in engine.module.named_parameters()]
    data = getattr(engine, "seq_data_parallel_group", None)
    children = internals.submodules(engine.module) if engine.has_moe_layers else ()
    routing = internals.parameters_of_routing(children) if children else frozenset()
    layers = {plain(layer.name): layer for layer in internals.expert_layers(children)} if children else {}
    found = {}
    for name, p in named:
        layer = layer_of(name, layers) if is_expert(p) else None
        if layer is not None and not layer.slices:
            found[id(p)] = _of_whole_expert(name, p, f"tensor-parallel rank {own} of {world}")
        else:
            parts = known.parts(name) if known else 0
            found[id(p)] = _slice(name, p, info, parts, own, world, data, whole=id(p) in routing)
    return Slices(found)


def _of_whole_expert(name: str, parameter: torch.nn.Parameter, where: str) -> Slice:
    """Return the slice of a parameter of an expert that a rank has whole. The ranks with the same expert share its storage."""
    marked = _marked(name, parameter, where)
    if marked is not None and marked.dim is not None:
        raise FormatError(
            f"{where}: {name} has tensor_model_parallel=True, but its layer has no enable_expert_tensor_parallelism, so "
            "DeepSpeed lays out whole experts among the tensor-parallel ranks"
        )
    return Slice.whole(local_shape(parameter))


def _slice(
    name: str, parameter: Any, info: Mapping[str, Any], parts: int, rank: int, world: int, data: Any, *, whole: bool
) -> Slice:
    """Return the part of a parameter on this rank.

    Args:
        info: ``universal_checkpoint_info``.
        parts: that of ``MegatronDeepSpeed``. It tells what ``info`` lacks.
        rank, world: tensor-parallel rank, and number of tensor-parallel ranks.
        data: data-parallel process group.
        whole: the ranks have the whole parameter, unless it is described.
    """
    where, local = f"tensor-parallel rank {rank} of {world}", local_shape(parameter)
    try:
        entry = affine_entry(info, name, where, trusted=True)
        if entry is not None:
            return _mapped(name, entry, local, rank, where)
        cut = _cut(name, parameter, info, where, whole=whole)
        cut = replace(cut, parts=parts) if parts else cut
        found = _divided(name, local, world, cut, where)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        raise FormatError(f"{where}: {INFO} does not describe {name} ({type(err).__name__}: {err})") from err
    if cut.averaged:
        if is_expert(parameter):
            raise FormatError(f"{where}: {name} is a parameter to average in an expert")
        if is_zero3(parameter) and dist.get_world_size(group=parameter.ds_process_group) > dist.get_world_size(group=data):
            raise FormatError(f"{where}: {name} is a parameter to average, but ZeRO-3 divides it among all ranks")
        return Slice.whole(local, averaged=True)
    if cut.dim is None:
        return Slice.whole(local, stored=rank == 0)
    return Slice(found.shape, local, found.placed[rank], found.placed[rank])


@lru_cache(maxsize=1 << 14)
def _divided(name: str, local: Shape, world: int, cut: Cut, where: str) -> Division:
    """The result is the same at every save, so it is kept."""
    return divided(name, [local] * world, cut, where)


def _mapped(name: str, entry: Mapping[str, Any], local: Shape, rank: int, where: str) -> Slice:
    boxes = affine_boxes(name, entry, rank, len(local), where)
    if any(box.scale != 1.0 for box in boxes):
        raise FormatError(f"{where}: the ranks have multiples of the elements of {name}")
    own = tuple(box for box in boxes if box.owner == rank)
    return Slice(merged(tuple(entry["logical_shape"]), len(local)), local, boxes, own)


def _cut(name: str, parameter: torch.nn.Parameter, info: Mapping[str, Any], where: str, *, whole: bool) -> Cut:
    """Return how a parameter is divided. Raises FormatError if it is unknown."""
    listed, marked = cut_of(name, info, where, trusted=True), _marked(name, parameter, where)
    found = listed or marked or (Cut(None) if whole else None)
    if found is None:
        raise FormatError(f"{where}: neither {INFO} nor the parameter itself tells how the ranks divide {name}. {_ADVICE}")
    if listed is not None and marked is not None and not _agree(listed, marked):
        raise FormatError(
            f"{where}: {INFO} {_text(listed)} {name}, but its attributes tensor_model_parallel, partition_dim and "
            f"partition_stride {_text(marked)} it"
        )
    return found


def _marked(name: str, parameter: Any, where: str) -> Cut | None:
    """Return what the attributes of a parameter tell (megatron/core/tensor_parallel/layers.py); None if they are missing."""
    parallel = getattr(parameter, "tensor_model_parallel", None)
    if parallel is None:
        return None
    if not parallel:
        return Cut(None)
    dim, stride = int(getattr(parameter, "partition_dim", -1)), int(getattr(parameter, "partition_stride", 1))
    if dim < 0 or stride < 1:
        raise FormatError(f"{where}: {name} has tensor_model_parallel=True with partition_dim {dim} and stride {stride}")
    return Cut(dim, parts=stride)


def _agree(listed: Cut, marked: Cut) -> bool:
    """Whether both sources may be right. The stride of 1 of Megatron's fused layers does not tell their sub-parameters."""
    if listed.dim is None or marked.dim is None:
        return listed.dim == marked.dim
    return (bool(listed.view) or listed.dim == marked.dim) and marked.parts in (1, listed.parts)


def _text(cut: Cut) -> str:
    if cut.dim is None:
        return "average" if cut.averaged else "replicate"
    return f"divide along dimension {cut.dim} in {cut.parts} parts" if cut.parts > 1 else f"divide along dimension {cut.dim}"
