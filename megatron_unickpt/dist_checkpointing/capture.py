"""Captures a sharded state dict as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from megatron_unickpt.framework import internals
from megatron_unickpt.held_state import hyperparameters, sharded_tensors
from megatron_unickpt.held_state.common_state import COMMON, VOCABULARY, readable, step_of
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.held_state.kept_description import KnownDescription, ReadState
from megatron_unickpt.held_state.sharded_tensors import MASTER, WEIGHT, FoundItem, LaterTensors, Piece, StateTensor
from unickpt import __version__
from unickpt.base.errors import UnsupportedLayoutError
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.save.kept import BoundShards, Keeper
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.checkpoint.save.shards import Contribution, Shard
from unickpt.checkpoint.state.held import Copies, Description, Held
from unickpt.transform.convert.megatron.keys import DIALECT
from unickpt.transform.dialects.model_facts import Model


def writer(vocabulary: int | None = None) -> Writer:
    """Return the writer's entry of the manifest.

    Args:
        vocabulary: number of entries of the tokenizer, without padding. None: the number of the scripts' tokenizer.
    """
    model = internals.model()
    if vocabulary is not None:
        model = Model(model.family, {**model.facts, "tokens": vocabulary}, model.settings)
    return Writer(
        "megatron", megatron.core.__version__, __version__, torch.__version__, DIALECT, internals.topology(), model.as_json()
    )


def optimizer_parts(state: Any) -> list[OptimizerPart]:
    """Return the optimizers that ``optimizer.sharded_state_dict`` added to a state dict."""
    return _parts_among(sharded_tensors.walk(state, later=False))


def _parts_among(leaves: Iterable[Any]) -> list[OptimizerPart]:
    objects = (leaf.obj for leaf in leaves if isinstance(leaf, LocalNonpersistentObject))
    return [found for found in objects if isinstance(found, OptimizerPart)]


def contribution(
    state: Any, common: Any, *, known: KnownDescription, own: Mapping[str, Any] | None = None, share: bool = True,
    directory: str = "",
) -> Contribution:  # fmt: skip
    """Return the contribution of this rank to the checkpoint.

    Args:
        state: sharded state dict, including factories. Not changed.
        common: part of the state dict that is neither sharded nor local (``mapping.common``).
        known: what earlier saves have described.
        own: values of the common state that are not those of rank 0.
        share: divide equal copies among the data parallel ranks. False: the first rank writes them.
        directory: of the checkpoint. Its name has the step if the common state has none.
    """
    leaves = sharded_tensors.walk(state, later=False)
    found, parts = list(sharded_tensors.sharded_among(leaves)), _parts_among(leaves)
    later = [leaf for leaf in leaves if isinstance(leaf, LaterTensors)]
    if len(later) != len(parts):  # the caller has made another state dict of it
        found, later = list(sharded_tensors.sharded(state)), []
    silent = (silent_steps(leaf.inner) for part in parts for leaf in part.leaves)
    unsteady = next(filter(None, silent), "") if parts else "the state dict has no optimizer of Megatron"
    shards, tensors, bound, keeper = _described(found, parts, later, known, share=share, steady=not unsteady)
    first = torch.distributed.get_rank() == 0
    record = next((r for part in parts if (r := hyperparameters.record_of(part, alone=first)) is not None), None)
    scalers = [part.grad_scaler for part in parts if part.grad_scaler is not None]
    return Contribution(
        shards=shards,
        tensors=tensors,
        bound=bound,
        keeper=keeper,
        shared_objects={
            f.item.unique_key: sharded_tensors.plain_object(f.item.data)
            for f in found
            if isinstance(f.item, ShardedObject) and sharded_tensors.is_main(f.item.replica_id)
        },
        unsteady=unsteady,
        step=step_of(common, directory),
        writer=writer(common.get(VOCABULARY) if isinstance(common, dict) else None),
        rank_objects={COMMON: own} if own else {},
        optimizer=record if first else None,
        optimizer_part=None if first else record,
        objects={COMMON: readable(common), "grad_scaler": scalers[0] if scalers else None} if first else {},
    )


def _refuse_partly_frozen(parts: Sequence[OptimizerPart]) -> None:
    """Raise if a tensor is made of trained and of frozen layers: its master and moments would have holes.

    Raises:
        UnsupportedLayoutError: names a tensor, and how each layer gets its own.
    """
    leaves = [leaf for part in parts for leaf in part.leaves]
    trained = {id(each) for leaf in leaves for each in (*leaf.elsewhere, *(held.parameter for held in leaf.held))}
    items = [item for part in parts for item in part.model.values()]
    keys = {item.key for item in items if id(item.data) in trained}
    for item in items:
        frozen = isinstance(item.data, torch.nn.Parameter) and not item.data.requires_grad
        if frozen and id(item.data) not in trained and item.key in keys:
            raise UnsupportedLayoutError(
                f"{item.key}: it has the weights of several layers, of which some are frozen and others are trained. Give each "
                'layer its own tensors: pass metadata={"non_homogeneous_layers": True} to saves and loads, or set '
                "hetereogenous_dist_checkpoint in the TransformerConfig"
            )


def _described(
    found: Sequence[FoundItem], parts: Sequence[OptimizerPart], later: Sequence[LaterTensors], known: KnownDescription, *,
    share: bool, steady: bool,
) -> tuple[list[Shard], list[TensorInfo], BoundShards | None, Keeper | None]:  # fmt: skip
    """Return shards and listed tensors; further shards that an earlier save has described; what keeps them for the next one."""
    read = ReadState.of(found, parts, known.names, known.mastered, share=share) if steady else None
    earlier = None if read is None else known.bound(read, parts)
    if read is not None and earlier is not None:
        held = description(read.changing, share=share, steady=True)
        tensors = list(dict.fromkeys([*earlier[1], *held.tensors]) if held.tensors else earlier[1])
        return held.shards(), tensors, earlier[0], None
    _refuse_partly_frozen(parts)
    states = [FoundItem(item, item.data) for each in later for item in each.values()]
    everything = [*found, *states]
    held = description(everything, share=share, steady=steady)
    tensors = list(dict.fromkeys(held.tensors))
    keeper = None
    if read is not None:
        known.mastered = _mastered(known.names.named(each.item) for each in everything if isinstance(each.item, ShardedTensor))
        read = ReadState.of(found, parts, known.names, known.mastered, share=share)
        changing = {each.item.key for each in read.changing}
        listed = [info for info in tensors if info.state != WEIGHT or info.name not in changing]
        keeper = known.keep(read, parts, listed)
    return held.shards(), tensors, None, keeper


def _mastered(named: Iterable[tuple[str, str]]) -> frozenset[str]:
    return frozenset(name for name, state in named if state == MASTER)


def description(found: Iterable[FoundItem], *, share: bool, steady: bool = False) -> Description:
    """Return what this rank holds.

    Args:
        found: sharded tensors and objects.
        share: as for ``contribution``.
        steady: masters, states and parameters change only in a step.
    """
    tensors = [(f, *sharded_tensors.tensor_of(f.item.key)) for f in found if isinstance(f.item, ShardedTensor)]
    mastered = {name for _, name, state in tensors if state == MASTER}
    origins = {name: f.origin for f, name, state in tensors if state == WEIGHT}
    out = Description()
    weights: dict[str, list[tuple[TensorInfo, Piece]]] = defaultdict(list)
    for f, name, state in tensors:
        derived = state == WEIGHT and name in mastered
        data = internals.dequantized(f.item.data) if f.item.data is not None else None
        info = TensorInfo(
            name,
            state,
            name_of(f.item.dtype if data is None else data.dtype, f"{name} ({state})"),
            tuple(f.item.global_shape),
            "parameter" if state in (WEIGHT, MASTER) else "optimizer",
            MASTER if derived else None,
        )
        pieces = [] if data is None else sharded_tensors.pieces_of(f.item, data.detach())
        if derived:
            weights[name] += [(info, piece) for piece in pieces]
        elif data is None or (state != WEIGHT and data.numel() == 0):
            continue  # a marker: other ranks list and write this tensor
        else:
            copies = _copies(f, origins.get(name), share)
            still = steady and (state != WEIGHT or isinstance(f.origin, torch.nn.Parameter))  # a buffer has no parameter
            out.held += [Held(info, each.box, each.data, copies, steady=still) for each in pieces if each.box.numel]
        out.tensors.append(info)
    written = [held for held in out.held if held.tensor.state == MASTER and (held.copies is None or held.copies.ranks)]
    for master in written:
        for info, weight in weights.get(master.tensor.name, ()):
            out.held += _unless_cast(info, weight, master)
    return out


def _copies(f: FoundItem, weight: Any, share: bool) -> Copies | None:
    """Return the ranks that divide the copies of a tensor. None: this rank alone writes it.

    The last coordinate of a replica id counts data parallel copies, by megatron-core's convention (see
    ``make_tp_sharded_tensor_for_checkpoint``). A tensor is written only if the other coordinates are 0.
    """
    replica = f.item.replica_id
    parameter = f.origin if isinstance(f.origin, torch.nn.Parameter) else weight
    whole = f.item.replicated if isinstance(f.item, StateTensor) else isinstance(f.origin, torch.nn.Parameter)
    rank = torch.distributed.get_rank()
    if share and whole and isinstance(parameter, torch.nn.Parameter) and isinstance(replica, tuple) and len(replica) == 3:
        ranks = internals.data_parallel_ranks(expert=internals.is_expert(parameter, f.item.key))
        if rank in ranks and replica == (0, 0, ranks.index(rank)):
            return Copies(ranks, rank)
    return None if sharded_tensors.is_main(replica) else Copies((), rank)


def _unless_cast(info: TensorInfo, weight: Piece, master: Held) -> Iterator[Held]:
    """Yield the part of a weight that has this master. It is stored where it is not the cast of it."""
    common = master.box.intersect(weight.box)
    if common is None:
        return
    data = weight.data[common.within(weight.box).slices()]
    origin = master.data.detach().view(master.box.shape)[common.within(master.box).slices()]
    if data.data_ptr() != origin.data_ptr() or data.dtype != origin.dtype:  # an fp32 weight is its own master
        yield Held(info, common, data, master.copies, origin, master.steady)
