"""Captures the state of a DeepSpeed engine as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ds_unickpt import batches, internals, megatron_deepspeed, owned_states, partitions, tensor_parallel, vocabulary
from ds_unickpt.fallbacks import require_supported
from ds_unickpt.huggingface import model_of
from ds_unickpt.names import ModuleNames
from ds_unickpt.optimizer_record import ElementStates, RankScalars, classify, record_of
from ds_unickpt.partitions import Partition, states_of
from ds_unickpt.placement import Placement, Share
from ds_unickpt.slices import Place, RankValues, Slice, Slices, places
from unickpt import __version__
from unickpt.convert.deepspeed.tensor_parallel import PlacedBox
from unickpt.coordination.rendezvous import Message
from unickpt.format import objects
from unickpt.format.boxes import Box
from unickpt.format.checksums import digest
from unickpt.format.dtypes import itemsize_bytes, name_of
from unickpt.format.index import TensorInfo
from unickpt.format.manifest import OptimizerRecord, Writer
from unickpt.load import rng
from unickpt.load.read_plan import share_of_replicas
from unickpt.options import Options
from unickpt.save.fingerprints import fingerprints
from unickpt.save.shards import Contribution, Shard

EXTRA_STATE = "module_extra_state"  # key in the objects of the job; the shared objects of other ranks start with it
MICRO_BATCHES = "pipeline_micro_batches"  # key in the objects of the job
SCALARS = "scalars"  # key in the objects of a rank and in the announcement
_DIGITS = 16  # hex digits of a fingerprint
_info = lru_cache(maxsize=1 << 16)(TensorInfo)  # the same at every save


def topology(engine: Any, names: ModuleNames, placed: Placement) -> dict[str, Any]:
    """Return parallel degrees and modes, for the manifest and for reports."""
    dtypes = sorted({name_of(p.dtype) for p in names.parameters.values()})
    sequence = int(getattr(engine, "sequence_parallel_size", 1))
    model_parallel = placed.stages > 1 or placed.tensors > 1
    degree = max((layer.degree for layer in names.experts.values()), default=1)
    return {
        "world_size": int(engine.world_size),
        "zero_stage": int(engine.zero_optimization_stage()),
        "optimizer_wrapper": internals.wrapper_of(engine),
        "weight_dtypes": dtypes,
        **({"sequence": sequence} if sequence > 1 else {}),
        **({"tensor": placed.tensors} if placed.tensors > 1 else {}),
        **({"pipeline": placed.stages} if placed.stages > 1 else {}),
        **({"data": len(placed.data)} if model_parallel else {}),
        **({"expert": degree} if degree > 1 else {}),
    }


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
class _Tensors:
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


class EngineState:
    """What a save reads of an engine. Each attribute is read when it is needed first, and once per save.

    Args:
        engine: the DeepSpeedEngine.
        options: options of the ``unickpt`` key.
        client_state: state of the caller. The checkpoint stores the coordinator's for the job, and that of another rank
            for that rank if it differs.
        exclude_frozen: leave out parameters that do not require a gradient.
    """

    def __init__(
        self, engine: Any, options: Options, client_state: Mapping[str, Any], *, exclude_frozen: bool
    ) -> None:  # fmt: skip
        self.engine, self.options = engine, options
        self.client_state, self.exclude_frozen = client_state, exclude_frozen

    @cached_property
    def supported(self) -> bool:
        """True. Raises UnsupportedLayoutError if unickpt does not support the job."""
        require_supported(self.engine)
        return True

    @cached_property
    def names(self) -> ModuleNames:
        """Names of the module, with this tensor-parallel rank's own values. It fails on a job that is not supported."""
        return ModuleNames.read(self.engine.module, self.values)

    @cached_property
    def values(self) -> RankValues:
        return tensor_parallel.rank_values(self.engine, self.slices)

    @cached_property
    def base(self) -> torch.optim.Optimizer | None:
        return internals.base_optimizer(self.engine)

    @cached_property
    def parts(self) -> list[Partition]:
        return partitions.partitions(self.engine, self.placed)

    @cached_property
    def slices(self) -> Slices:
        return tensor_parallel.slices(self.engine)

    @cached_property
    def placed(self) -> Placement:
        return partitions.placement(self.engine, self.names.experts.values(), self.values)

    @cached_property
    def scalars(self) -> RankScalars | None:
        """Scalars of this rank, if the ranks may have others."""
        if self.base is None or not _of_parts(self.parts, self.slices):
            return None
        return RankScalars.of(self.parts, self.names, self.base)

    @cached_property
    def tensors(self) -> tuple[_Tensors, tuple[str, ...]]:
        """Tensors that this rank writes, and the names of excluded parameters."""
        out = _Tensors()
        _optimized(out, self.parts, self.names, self.slices, self.base, self.placed)
        excluded = _others(out, self.parts, self.names, self.slices, self.exclude_frozen, self.placed)
        _buffers(out, self.options, self.names, self.placed)
        out.share()
        return out, excluded

    @cached_property
    def record(self) -> OptimizerRecord | None:
        return None if self.base is None else record_of(self.parts, self.names, self.base)

    @cached_property
    def digests(self) -> Message:
        """Digests of this rank's state. The other ranks compare the coordinator's with their own to find values that differ."""
        replicas = _tensor_parallel_replicas(self.engine, self.names, self.slices)
        return {
            "client_state": client_state_digest(self.client_state),
            "replicas": "".join(fingerprints([p.detach() for _, p in replicas])),
            "buffers": "".join(fingerprints([buffer for _, buffer in _stored_buffers(self.names, self.options)])),
            **({} if self.scalars is None else {SCALARS: self.scalars.fingerprint()}),
        }

    def announcement(self) -> Message:
        """Return the digests of the coordinator, or that of the client state alone if the state cannot be described."""
        with contextlib.suppress(Exception):  # ``contribution`` raises the same error on all ranks
            return self.digests
        return {"client_state": client_state_digest(self.client_state)}

    def read(self) -> None:
        """Read what does not depend on the coordinator's announcement."""
        _ = self.supported, self.tensors, self.record
        if self.engine.global_rank:
            _ = self.digests

    def forget(self) -> None:
        """Release what was read. The next use reads it again."""
        for name in [name for name, value in vars(type(self)).items() if isinstance(value, cached_property)]:
            vars(self).pop(name, None)


def contribution(state: EngineState, announced: Message) -> Contribution:
    """Return the contribution of this rank to the checkpoint.

    Args:
        state: of this save.
        announced: ``announcement`` of the coordinator.

    Raises:
        UnsupportedLayoutError: the job uses a layout that unickpt does not support.
    """
    state.read()
    engine, names, placed, base, parts = state.engine, state.names, state.placed, state.base, state.parts
    out, excluded = state.tensors
    rank_objects: dict[str, Any] = {"rng": rng.capture()}
    if engine.global_rank and state.digests["client_state"] != announced.get("client_state"):
        rank_objects["client_state"] = dict(state.client_state)
    if state.scalars is not None:
        rank_objects[SCALARS] = state.scalars.to_object()
    return Contribution(
        shards=out.shards,
        tensors=out.listed,
        rank_objects=rank_objects,
        step=int(engine.global_steps),
        writer=writer(engine, names, placed),
        optimizer=state.record,
        optimizer_part=_part(state.record, names, placed),
        aliases=names.aliases if placed.first else {},
        excluded=excluded if placed.first else (),
        objects=_objects(engine, names, state.client_state) if placed.rank == 0 else {},
        shared_objects={
            **(_shared_states(names, placed) if placed.rank else {}),
            **({} if base is None else owned_states.captured(parts, names, state.slices, base, placed)),
            **_vocabularies(engine, names, state.client_state, placed),
        },
        different=_different(state, announced) if placed.rank and placed.with_coordinator else (),
        replica=None if placed.part is None else (placed.part, _fingerprint(parts, base)),
    )


def _of_parts(parts: Sequence[Partition], slices: Slices) -> bool:
    """Whether the optimizer steps on parts of parameters on this rank, so that the ranks may have other scalars."""
    if not all(part.replicated for part in parts):
        return True
    return not all(slices.of(parameter).replicated for part in parts for parameter in part.parameters)


def _part(record: OptimizerRecord | None, names: ModuleNames, placed: Placement) -> OptimizerRecord | None:
    """Return the groups and scalars of the parameters that this rank is the first one to have; None if there are none."""
    if record is None:
        return None
    groups, scalars = (
        tuple(
            replace(g, parameters=own)
            for g in found
            if (own := tuple(n for n in g.parameters if placed.leads(names.having(n))))
        )
        for found in (record.groups, record.scalars)
    )
    return OptimizerRecord(record.name, groups, scalars) if groups else None


def _different(state: EngineState, announced: Message) -> tuple[tuple[str, str], ...]:
    """Return what differs between this rank and the coordinator, each with the consequence for a load."""
    found, names = [], state.names
    replicas = _tensor_parallel_replicas(state.engine, names, state.slices)
    buffers = _stored_buffers(names, state.options)
    for key, kind, tensors in (("buffers", "buffer", buffers), ("replicas", "parameter", replicas)):
        theirs, ours = announced.get(key, ""), state.digests.get(key, "")
        if theirs == ours or len(theirs) != len(ours):
            continue
        for at, (name, _) in enumerate(tensors):
            place = slice(_DIGITS * at, _DIGITS * (at + 1))
            if ours[place] != theirs[place] and 0 in (names.holders(name) or (0,)):
                found.append((f"{kind} {name}", "Rank 0's values are stored. After a load every rank has them."))
    ours = state.digests.get(SCALARS, "")
    if ours and SCALARS in announced and ours != announced[SCALARS]:
        follows = "With the same layout each rank gets its own values back. With another layout all ranks get rank 0's."
        found.append(("scalars of the optimizer", follows))
    return tuple(found)


def _tensor_parallel_replicas(engine: Any, names: ModuleNames, slices: Slices) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that all tensor-parallel ranks should hold alike; () under ZeRO-3, where a rank has a part of them."""
    if tensor_parallel.degree(engine) == 1 or engine.zero_optimization_partition_weights():
        return []
    return [(name, parameter) for name, parameter in names.parameters.items() if slices.of(parameter).replicated]


def _fingerprint(parts: Sequence[Partition], base: torch.optim.Optimizer | None) -> str:
    """Return a fingerprint of this rank's masters and optimizer states. It is equal on replicas.

    The padding of a partition is left out. ZeRO-3 does not initialise it (``partition_parameters.py``, ``_partition_param``).
    """
    tensors = []
    for part in parts:
        state = states_of(base, part) if base is not None else {}
        tensors += _held_elements(part, "master", part.elements)
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                tensors += _held_elements(part, key, value)
    return digest("".join(fingerprints(tensors)).encode())


def _held_elements(part: Partition, key: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of a state that belong to parameters; the whole tensor if it is not elementwise."""
    if key not in part.whole and value.numel() != part.elements.numel():
        return [value]
    flat = value.detach().reshape(-1)
    return [flat.narrow(0, piece.at, piece.hi - piece.lo) for piece in part.held(key)]


def client_state_digest(client_state: Mapping[str, Any]) -> str:
    """Return a digest of a client state. Ranks compare digests instead of the states themselves."""
    encoded = objects.encode(dict(client_state), prefix="client")
    digest = hashlib.sha256(json.dumps(encoded.value, sort_keys=True).encode())
    for key, tensor in encoded.tensors.items():
        digest.update(key.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def writer(engine: Any, names: ModuleNames, placed: Placement) -> Writer:
    """Return the writer's entry of the manifest."""
    from deepspeed.git_version_info import version

    known = megatron_deepspeed.job_of(engine.module)
    dialect, model = ("huggingface", model_of(engine.module)) if known is None else (known.dialect, known.model)
    return Writer(
        "deepspeed", version, __version__, torch.__version__, dialect, topology(engine, names, placed), model.as_json()
    )


def _optimized(
    out: _Tensors,
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
    out: _Tensors,
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


def _others(
    out: _Tensors, parts: Sequence[Partition], names: ModuleNames, slices: Slices, exclude_frozen: bool, placed: Placement
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


def _stored_buffers(names: ModuleNames, options: Options) -> list[tuple[str, torch.Tensor]]:
    return [(each.name, each.tensor) for each in names.buffers if each.persistent or options.non_persistent_buffers]


def _buffers(out: _Tensors, options: Options, names: ModuleNames, placed: Placement) -> None:
    """Add the buffers that this rank is the first one to have. Running statistics differ between ranks, so parts do not fit."""
    for name, buffer in _stored_buffers(names, options):
        info = TensorInfo(name, "weight", name_of(buffer.dtype), tuple(buffer.shape), "buffer")
        out.listed.append(info)
        if placed.leads(names.having(name)) and info.numel:
            out.shards.append(Shard(info, Box.whole(info.shape), buffer))


def _objects(engine: Any, names: ModuleNames, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-tensor state of the job, which is what DeepSpeed itself saves."""
    scaler, grad_scaler = internals.loss_scaler(engine), internals.grad_scaler(engine)
    scheduler = internals.lr_scheduler(engine)
    found: dict[str, Any] = {
        "client_state": dict(client_state),
        "engine": {key: int(getattr(engine, key)) for key in ("global_steps", "global_samples", "skipped_steps")},
        "ds_config": dict(internals.config_of(engine)),
        batches.BATCH: batches.of_engine(engine).to_json(),
        "lr_scheduler": _named_state(scheduler),
        "loss_scaler": None
        if scaler is None
        else {k: getattr(scaler, k) for k in internals.SCALER_FIELDS if hasattr(scaler, k)},
        "grad_scaler": None if grad_scaler is None else grad_scaler.state_dict(),
        EXTRA_STATE: _extra_states(names),
    }
    if engine.pipeline_parallelism:
        found[MICRO_BATCHES] = internals.micro_batches(engine)
    found |= {key: None if value is None else value.state_dict() for key, value in internals.extra_states(engine).items()}
    return found


def _named_state(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def _extra_states(names: ModuleNames) -> dict[str, Any]:
    """Return ``get_extra_state`` of the modules of this rank, by the stored name of the module."""
    return {
        name: child.get_extra_state()
        for name, child in names.modules
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state
    }


def _vocabularies(engine: Any, names: ModuleNames, client_state: Mapping[str, Any], placed: Placement) -> dict[str, Any]:
    """Return the entries of the padded vocabularies that this rank is the first one to have, by their shared key."""
    found = vocabulary.of_job(engine, names, client_state)
    own = (name for name in found if placed.leads(names.having(name)) and name not in names.elsewhere)
    return {f"{vocabulary.STORED}{name}": found[name] for name in own}


def _shared_states(names: ModuleNames, placed: Placement) -> dict[str, Any]:
    """Return the extra states of the modules that this rank is the first one to have, by their key in the shared objects."""
    found = _extra_states(names)
    return {f"{EXTRA_STATE}/{name}": state for name, state in found.items() if placed.leads(names.having(name))}
