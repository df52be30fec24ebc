"""Captures a sharded state dict as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from megatron_unickpt.framework import internals
from megatron_unickpt.held_state import hyperparameters, sharded_tensors
from megatron_unickpt.held_state.common_state import COMMON, VOCABULARY, readable, step_of
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.held_state.sharded_tensors import MASTER, WEIGHT, Found, Piece, StateTensor
from unickpt import __version__
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.read_plan import share_of_replicas
from unickpt.checkpoint.save.shards import Contribution, Shard
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
    return Writer("megatron", megatron.core.__version__, __version__, torch.__version__, DIALECT, internals.topology(),
                  model.as_json())  # fmt: skip


def optimizer_parts(state: Any) -> list[OptimizerPart]:
    """Return the optimizers that ``optimizer.sharded_state_dict`` added to a state dict."""
    found = []
    for leaf in sharded_tensors.walk(state):
        if isinstance(leaf, LocalNonpersistentObject) and isinstance(leaf.obj, OptimizerPart):
            found.append(leaf.obj)
    return found


@dataclass
class _Tensors:
    """Collects the tensors of this rank: those that it writes, copies that it shares with other ranks, and others to list."""

    shards: list[Shard] = field(default_factory=list)
    listed: list[TensorInfo] = field(default_factory=list)
    replicas: dict[tuple[int, int], list[tuple[TensorInfo, Piece]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, info: TensorInfo, piece: Piece, place: tuple[int, int] | None) -> None:
        """Add a tensor. ``place`` is its position and number among equal copies; None if other ranks write it."""
        self.listed.append(info)
        if place is None or piece.box.numel == 0:
            return
        if place[1] > 1:
            self.replicas[place].append((info, piece))
        else:
            self.shards.append(Shard(info, piece.box, piece.data))

    def share(self) -> None:
        """Add this rank's part of the copies. Every rank of a group gets the same number of bytes."""
        for (position, count), held in self.replicas.items():
            held.sort(key=lambda pair: (pair[0].key, pair[1].box.start))
            sizes = [piece.data.numel() * piece.data.element_size() for _, piece in held]
            numels = [piece.data.numel() for _, piece in held]
            ranges = share_of_replicas(sizes, numels, rank=position, world=count)
            for (info, piece), (lo, hi) in zip(held, ranges, strict=True):
                for box in split_flat_range(piece.box.shape, lo, hi):
                    start = tuple(a + b for a, b in zip(piece.box.start, box.start, strict=True))
                    self.shards.append(Shard(info, Box(start, box.shape), piece.data[box.slices()]))


def contribution(state: Any, common: Any, *, share: bool = True) -> Contribution:
    """Return the contribution of this rank to the checkpoint.

    Args:
        state: sharded state dict, including factories. Not changed.
        common: part of the state dict that is neither sharded nor local (``mapping.common``).
        share: divide equal copies among the data parallel ranks. False: the first rank writes them.
    """
    found = list(sharded_tensors.sharded(state))
    tensors = [(f, *sharded_tensors.tensor_of(f.item.key)) for f in found if isinstance(f.item, ShardedTensor)]
    mastered = {name for _, name, state_name in tensors if state_name == MASTER}
    origins = {name: f.origin for f, name, state_name in tensors if state_name == WEIGHT}
    out = _Tensors()
    weights: dict[str, list[Piece]] = defaultdict(list)
    for f, name, state_name in tensors:
        if state_name == WEIGHT and name in mastered:
            weights[name] += _pieces(f)
    weight_infos: dict[str, TensorInfo] = {}
    for f, name, state_name in tensors:
        item = f.item
        derived = state_name == WEIGHT and name in mastered
        data = internals.dequantized(item.data) if item.data is not None else None
        info = TensorInfo(
            name, state_name, name_of(item.dtype if data is None else data.dtype), tuple(item.global_shape),
            "parameter" if state_name in (WEIGHT, MASTER) else "optimizer", MASTER if derived else None,
        )  # fmt: skip
        if derived:
            weight_infos[name] = info
            out.listed.append(info)
            continue
        if state_name != WEIGHT and item.data is not None and item.data.numel() == 0:
            continue  # a marker: other ranks list and write this tensor
        place = _place(f, origins.get(name), share)
        for piece in _pieces(f):
            out.add(info, piece, place)
    out.share()
    _override(out, weights, weight_infos)
    parts = optimizer_parts(state)
    first = torch.distributed.get_rank() == 0
    record = next((r for part in parts if (r := hyperparameters.record_of(part, alone=first)) is not None), None)
    scalers = [part.grad_scaler for part in parts if part.grad_scaler is not None]
    return Contribution(
        shards=out.shards,
        tensors=list(dict.fromkeys(out.listed)),
        shared_objects={
            f.item.unique_key: sharded_tensors.plain_object(f.item.data)
            for f in found
            if isinstance(f.item, ShardedObject) and sharded_tensors.is_main(f.item.replica_id)
        },
        step=step_of(common),
        writer=writer(common.get(VOCABULARY) if isinstance(common, dict) else None),
        optimizer=record if first else None,
        optimizer_part=None if first else record,
        objects={COMMON: readable(common), "grad_scaler": scalers[0] if scalers else None} if first else {},
    )


def _pieces(f: Found) -> list[Piece]:
    assert isinstance(f.item, ShardedTensor)
    return [] if f.item.data is None else sharded_tensors.pieces_of(f.item, internals.dequantized(f.item.data).detach())


def _place(f: Found, weight: Any, share: bool) -> tuple[int, int] | None:
    """Return ``(position, count)`` among the copies that the ranks divide, or None if another rank writes this one.

    The last coordinate of a replica id counts data parallel copies, by megatron-core's convention (see
    ``make_tp_sharded_tensor_for_checkpoint``). A tensor is written only if the other coordinates are 0.
    """
    replica = f.item.replica_id
    parameter = f.origin if isinstance(f.origin, torch.nn.Parameter) else weight
    whole = f.item.replicated if isinstance(f.item, StateTensor) else isinstance(f.origin, torch.nn.Parameter)
    if share and whole and isinstance(parameter, torch.nn.Parameter) and isinstance(replica, tuple) and len(replica) == 3:
        position, count = internals.data_parallel_replicas(expert=internals.is_expert(parameter, f.item.key))
        if replica == (0, 0, position):
            return position, count
    return (0, 1) if sharded_tensors.is_main(replica) else None


def _override(out: _Tensors, weights: Mapping[str, list[Piece]], infos: Mapping[str, TensorInfo]) -> None:
    """Store weights that are not the cast of their masters. Each rank compares the masters that it writes itself."""
    more = []
    for shard in out.shards:
        if shard.tensor.state != MASTER:
            continue
        for weight in weights.get(shard.tensor.name, ()):
            common = shard.box.intersect(weight.box)
            if common is None:
                continue
            held = weight.data[common.within(weight.box).slices()]
            master = shard.data.detach().view(shard.box.shape)[common.within(shard.box).slices()]
            if held.data_ptr() == master.data_ptr() and held.dtype == master.dtype:
                continue  # an fp32 weight is its own master
            more.append(Shard(infos[shard.tensor.name], common, held, unless=master))
    out.shards += more
