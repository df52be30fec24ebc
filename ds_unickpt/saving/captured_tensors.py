"""The tensors of a DeepSpeed engine that this rank writes: masters, states, weights that are not casts, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ds_unickpt.held_state import partitions
from ds_unickpt.held_state.names import ModuleNames
from ds_unickpt.held_state.optimizer_record import ElementStates, classify
from ds_unickpt.held_state.partitions import Partition, states_of
from ds_unickpt.placing.placement import Placement, Share
from ds_unickpt.placing.slices import Place, Slice, Slices, places
from unickpt.base.options.job import Options
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import itemsize_bytes, name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.read_plan import share_of_replicas
from unickpt.checkpoint.save.shards import Shard
from unickpt.transform.convert.deepspeed.tensor_parallel import PlacedBox

_info = lru_cache(maxsize=1 << 16)(TensorInfo)  # the same at every save


@dataclass(frozen=True, slots=True)
class Stored:
    """The boxes of a rank's slice that the rank stores, and the shape of its tensor."""

    local: tuple[int, ...]
    boxes: tuple[PlacedBox, ...]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[PlacedBox, ...]]:
        """The first arguments of ``places``."""
        return self.local, self.boxes

    @classmethod
    def of(cls, part: Slice, *, stored: bool, across: bool = False) -> Stored:
        """Return what a rank stores. ``stored`` and ``across`` are those of ``Partition``."""
        return cls(part.local, (part.boxes if across else part.own) if stored else ())


@dataclass(frozen=True, slots=True)
class _Replica:
    """A tensor that the ranks of ``share`` hold. ``unless`` is that of ``Shard``."""

    info: TensorInfo
    place: Stored
    data: torch.Tensor
    unless: torch.Tensor | None
    share: Share


@dataclass
class CapturedTensors:
    """Collects the tensors that this rank writes. Replicas are divided among their ranks at the end, in ``share``."""

    shards: list[Shard] = field(default_factory=list)
    listed: list[TensorInfo] = field(default_factory=list)
    replicas: list[_Replica] = field(default_factory=list)

    def own(
        self, info: TensorInfo, found: Sequence[Place], at: int, flat: torch.Tensor, unless: torch.Tensor | None = None
    ) -> None:
        """Add a flat range of this rank's slice of a tensor. Only this rank has it.

        Args:
            info: the tensor.
            found: the parts of the range that the rank stores.
            at: position of the range in ``flat``.
            flat: tensor with the elements, 1-D.
            unless: as in ``Shard``, with the same positions.
        """
        self._add(info, found, at, flat, unless)

    def _add(self, info: TensorInfo, found: Sequence[Place], at: int, flat: torch.Tensor, unless: torch.Tensor | None) -> None:
        for part in found:
            self.shards.append(Shard(info, part.whole, part.of(flat, at), None if unless is None else part.of(unless, at)))

    def replicated(
        self, info: TensorInfo, place: Stored, data: torch.Tensor, share: Share, unless: torch.Tensor | None = None
    ) -> None:
        if place.boxes:
            self.replicas.append(_Replica(info, place, data, unless, share))

    def share(self) -> None:
        """Add this rank's part of the replicas. Every rank that holds the same replicas gets the same number of bytes.

        Replicas with a condition (``unless``) are divided separately, because usually none of them is written.
        """
        self.replicas.sort(key=lambda replica: replica.info.key)
        for share in dict.fromkeys(replica.share for replica in self.replicas):
            held = [replica for replica in self.replicas if replica.share == share]
            self._share([replica for replica in held if replica.unless is None], share)
            self._share([replica for replica in held if replica.unless is not None], share)

    def _share(self, replicas: Sequence[_Replica], share: Share) -> None:
        if share.rank < 0:
            return
        numels = [replica.data.numel() for replica in replicas]
        sizes = [numel * itemsize_bytes(replica.info.dtype) for numel, replica in zip(numels, replicas, strict=True)]
        ranges = share_of_replicas(sizes, numels, rank=share.rank, world=share.world)
        for replica, (lo, hi) in zip(replicas, ranges, strict=True):
            if lo < hi:
                unless = None if replica.unless is None else replica.unless.detach().reshape(-1)
                found = places(*replica.place.key, lo, hi)
                self._add(replica.info, found, lo, replica.data.detach().reshape(-1), unless)


def add_optimized(
    out: CapturedTensors,
    parts: Sequence[Partition],
    names: ModuleNames,
    slices: Slices,
    base: torch.optim.Optimizer | None,
    placed: Placement,
) -> None:
    """Add masters and optimizer states. Also add the weights that are not the cast of their masters."""
    kinds = classify(parts, base)
    for part in parts:
        held = {"master": part.elements, **_tensor_states(base, part, kinds)}
        flats = {key: tensor.detach().reshape(-1) for key, tensor in held.items()}
        states = [(key, name_of(tensor.dtype), "parameter" if key == "master" else "optimizer") for key, tensor in held.items()]
        known, stored = {}, {}
        for parameter in part.parameters:
            own, name = slices.of(parameter), names.name(parameter)
            infos = {key: _info(name, key, dtype, own.shape, kind) for key, dtype, kind in states}
            infos["weight"] = _info(name, "weight", name_of(parameter.dtype), own.shape, "parameter", "master")
            known[id(parameter)] = infos
            out.listed += infos.values()
            stored[id(parameter)] = Stored.of(own, stored=part.stored and name not in names.elsewhere, across=part.across)
        if part.replicated:
            _replicated(out, part, names, known, stored, flats, placed)
            continue
        found = [(piece, places(*stored[id(piece.parameter)].key, piece.lo, piece.hi)) for piece in part.pieces]
        for key, flat in flats.items():
            for held_at, (piece, where) in zip(part.own(key), found, strict=True):
                out.own(known[id(piece.parameter)][key], where, held_at.at, flat)
        weights = None if part.weight is None else part.weight.detach().reshape(-1)
        for piece, where in found:
            info = known[id(piece.parameter)]["weight"]
            if info.name in names.elsewhere:
                continue
            if weights is not None:
                out.own(info, where, piece.at, weights, flats["master"])
            elif (weight := part.weight_of(piece)) is not None:
                out.own(info, where, 0, weight, flats["master"].narrow(0, piece.at, piece.hi - piece.lo))


def _tensor_states(base: torch.optim.Optimizer | None, part: Partition, kinds: ElementStates) -> dict[str, torch.Tensor]:
    state = {} if base is None else states_of(base, part)
    return {key: value for key, value in state.items() if key in kinds.tensors and value is not None}


def _replicated(
    out: CapturedTensors,
    part: Partition,
    names: ModuleNames,
    known: Mapping[int, Mapping[str, TensorInfo]],
    stored: Mapping[int, Stored],
    flats: Mapping[str, torch.Tensor],
    placed: Placement,
) -> None:
    """Add a partition that all ranks hold. ``known``, ``stored``: by ``id`` of the parameter."""
    for key, flat in flats.items():
        for piece in part.own(key):
            info = known[id(piece.parameter)][key]
            data = flat.narrow(0, piece.at, piece.hi - piece.lo)
            out.replicated(info, stored[id(piece.parameter)], data, placed.share_among(names.holders(info.name)))
    for piece in part.pieces:
        info, weight = known[id(piece.parameter)]["weight"], part.weight_of(piece)
        if weight is not None and info.name not in names.elsewhere:
            master = flats["master"].narrow(0, piece.at, piece.hi - piece.lo)
            share = placed.share_among(names.holders(info.name))
            out.replicated(info, stored[id(piece.parameter)], weight, share, unless=master)


def add_others(
    out: CapturedTensors,
    parts: Sequence[Partition],
    names: ModuleNames,
    slices: Slices,
    exclude_frozen: bool,
    placed: Placement,
) -> tuple[str, ...]:
    """Add the parameters outside the optimizer, such as frozen and empty ones. Returns the names of excluded parameters."""
    optimized = {id(p) for part in parts for p in part.parameters}
    excluded = []
    for name, parameter in names.parameters.items():
        if id(parameter) in optimized:
            continue
        if exclude_frozen and not parameter.requires_grad:
            excluded.append(name)
            continue
        part = slices.of(parameter)
        info = TensorInfo(name, "weight", name_of(parameter.dtype), part.shape, "parameter")
        out.listed.append(info)
        held = partitions.held(parameter, placed)
        if held is None:
            continue
        place = Stored.of(part, stored=held.stored and name not in names.elsewhere, across=held.across)
        if held.replicated:
            out.replicated(info, place, held.data, placed.share_among(names.holders(name)))
        else:
            out.own(info, places(*place.key, held.lo, held.hi), 0, held.data)
    return tuple(excluded)


def stored_buffers(names: ModuleNames, options: Options) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint has, by name."""
    return [(each.name, each.tensor) for each in names.buffers if each.persistent or options.non_persistent_buffers]


def add_buffers(out: CapturedTensors, options: Options, names: ModuleNames, placed: Placement) -> None:
    """Add the buffers that this rank is the first one to have. Running statistics differ between ranks, so parts do not fit."""
    for name, buffer in stored_buffers(names, options):
        info = TensorInfo(name, "weight", name_of(buffer.dtype), tuple(buffer.shape), "buffer")
        out.listed.append(info)
        if placed.leads(names.having(name)) and info.numel:
            out.shards.append(Shard(info, Box.whole(info.shape), buffer))
