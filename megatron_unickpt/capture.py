"""A sharded state dict as this rank's contribution to a checkpoint. Communicates nothing."""

from __future__ import annotations

import argparse
import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from megatron_unickpt import internals, mapping, optimizer
from megatron_unickpt.mapping import MASTER, WEIGHT, Found, Piece, StateTensor
from megatron_unickpt.optimizer import OptimizerPart
from unickpt import __version__
from unickpt.contribution import Contribution, Shard
from unickpt.dtypes import name_of
from unickpt.fragments import Box, split_flat_range
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import Writer
from unickpt.planning import share_of_replicas

COMMON = "common"  # name of Megatron's common state dict among the job's objects


VOCABULARY = "vocabulary"  # key of the common state: entries of the tokenizer, where no scripts tell


def writer(vocabulary: int | None = None) -> Writer:
    """Who writes, for the manifest.

    Args:
        vocabulary: entries of the tokenizer, without padding. None: as the scripts' tokenizer has it.
    """
    model = internals.model()
    if vocabulary is not None:
        model = Model(model.family, {**model.facts, "tokens": vocabulary}, model.settings)
    return Writer("megatron", megatron.core.__version__, __version__, torch.__version__, "megatron-core", internals.topology(),
                  model.as_json())  # fmt: skip


def optimizer_parts(state: Any) -> list[OptimizerPart]:
    """The optimizers that put themselves into a state dict by ``optimizer.sharded_state_dict``."""
    found = []
    for leaf in mapping.walk(state):
        if isinstance(leaf, LocalNonpersistentObject) and isinstance(leaf.obj, OptimizerPart):
            found.append(leaf.obj)
    return found


@dataclass
class _Tensors:
    """Sorts what this rank holds into what it writes, what it shares, and what it only lists."""

    shards: list[Shard] = field(default_factory=list)
    listed: list[TensorInfo] = field(default_factory=list)
    replicas: dict[tuple[int, int], list[tuple[TensorInfo, Piece]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, info: TensorInfo, piece: Piece, place: tuple[int, int] | None) -> None:
        """``place``: position and number among equal copies; None for a copy that others write."""
        self.listed.append(info)
        if place is None or piece.box.numel == 0:
            return
        if place[1] > 1:
            self.replicas[place].append((info, piece))
        else:
            self.shards.append(Shard(info, piece.box, piece.data))

    def share(self) -> None:
        """This rank's part of the copies: every rank of a group takes an equal number of bytes, by arithmetic."""
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
    """Everything that this rank adds to the checkpoint.

    Args:
        state: sharded state dict, factories and all. Not changed.
        common: its part that is neither sharded nor local (``mapping.common``).
        share: spread what data parallel ranks hold alike over all of them, instead of having the
            first one write it.
    """
    found = list(mapping.sharded(state))
    tensors = [(f, *mapping.tensor_of(f.item.key)) for f in found if isinstance(f.item, ShardedTensor)]
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
            continue  # a marker: others list this tensor, and write it
        place = _place(f, origins.get(name), share)
        for piece in _pieces(f):
            out.add(info, piece, place)
    out.share()
    _override(out, weights, weight_infos)
    parts = optimizer_parts(state)
    first = torch.distributed.get_rank() == 0
    record = next((r for part in parts if (r := optimizer.record_of(part, alone=first)) is not None), None)
    scalers = [part.grad_scaler for part in parts if part.grad_scaler is not None]
    return Contribution(
        shards=out.shards,
        tensors=list(dict.fromkeys(out.listed)),
        shared_objects={
            f.item.unique_key: mapping.plain_object(f.item.data)
            for f in found
            if isinstance(f.item, ShardedObject) and mapping.is_main(f.item.replica_id)
        },
        step=_step(common),
        writer=writer(common.get(VOCABULARY) if isinstance(common, dict) else None),
        optimizer=record if first else None,
        optimizer_part=None if first else record,
        objects={COMMON: readable(common), "grad_scaler": scalers[0] if scalers else None} if first else {},
    )


def _pieces(f: Found) -> list[Piece]:
    assert isinstance(f.item, ShardedTensor)
    return [] if f.item.data is None else mapping.pieces_of(f.item, internals.dequantized(f.item.data).detach())


def _place(f: Found, weight: Any, share: bool) -> tuple[int, int] | None:
    """``(position, count)`` among copies that are written in turns, or None if another rank writes this one.

    The last coordinate of a replica id counts data parallel copies (megatron-core's convention, see
    ``make_tp_sharded_tensor_for_checkpoint``); the others must be 0 for a tensor that is written at all.
    """
    replica = f.item.replica_id
    parameter = f.origin if isinstance(f.origin, torch.nn.Parameter) else weight
    whole = f.item.replicated if isinstance(f.item, StateTensor) else isinstance(f.origin, torch.nn.Parameter)
    if share and whole and isinstance(parameter, torch.nn.Parameter) and isinstance(replica, tuple) and len(replica) == 3:
        position, count = internals.data_parallel_replicas(expert=internals.is_expert(parameter, f.item.key))
        if replica == (0, 0, position):
            return position, count
    return (0, 1) if mapping.is_main(replica) else None


def _override(out: _Tensors, weights: Mapping[str, list[Piece]], infos: Mapping[str, TensorInfo]) -> None:
    """Store weights that are not the cast of their masters: each rank looks at the masters that it writes itself."""
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


def _step(common: Any) -> int:
    found = common.get("iteration", 0) if isinstance(common, dict) else 0
    return int(found) if isinstance(found, int) and found >= 0 else 0


def readable(common: Any) -> Any:
    """Megatron's common state with its arguments in plain values: what JSON can hold."""
    if not isinstance(common, dict) or not isinstance(common.get("args"), argparse.Namespace):
        return common
    return {**common, "args": argparse.Namespace(**dict(_plain_arguments(vars(common["args"]))))}


_PLAIN = (bool, int, float, str, enum.Enum, torch.dtype, type(None))


def _plain_arguments(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if _is_plain(value):
            yield key, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN)
