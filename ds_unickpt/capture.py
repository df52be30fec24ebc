"""Captures the state of a DeepSpeed engine as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ds_unickpt import batches, internals, megatron_deepspeed, owned_states, partitions, tensor_parallel, vocabulary
from ds_unickpt.fallbacks import require_supported
from ds_unickpt.huggingface import model_of
from ds_unickpt.names import ModuleNames
from ds_unickpt.optimizer_record import ElementStates, RankScalars, classify, record_of
from ds_unickpt.partitions import ParameterRange, Partition, states_of
from ds_unickpt.placement import Placement, Share
from ds_unickpt.slices import Slice, Slices, places
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


def topology(engine: Any, names: ModuleNames) -> dict[str, Any]:
    """Return parallel degrees and modes, for the manifest and for reports."""
    dtypes = sorted({name_of(p.dtype) for p in names.parameters.values()})
    sequence = int(getattr(engine, "sequence_parallel_size", 1))
    placed = partitions.placement(engine, names.experts.values())
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

    @classmethod
    def of(cls, part: Slice, *, stored: bool, across: bool = False) -> Stored:
        """Return what a rank stores. ``stored`` and ``across`` are those of ``Partition``."""
        return cls(part.local, (part.boxes if across else part.own) if stored else ())


@dataclass(frozen=True, slots=True)
class _Replica:
    """A tensor that the ranks of ``share`` hold. ``unless`` is that of ``Shard``, ``place`` that of ``_Tensors.own``."""

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
        self, info: TensorInfo, place: Stored, lo: int, hi: int, flat: torch.Tensor, unless: torch.Tensor | None = None
    ) -> None:
        """Add the flat range ``[lo, hi)`` of this rank's slice of a tensor, given its elements as a 1-D tensor."""
        self.listed.append(info)
        self._add(info, place, lo, hi, flat, unless)

    def _add(self, info: TensorInfo, place: Stored, lo: int, hi: int, flat: torch.Tensor, unless: torch.Tensor | None) -> None:
        for part in places(place.local, place.boxes, lo, hi):
            self.shards.append(Shard(info, part.whole, part.of(flat), None if unless is None else part.of(unless)))

    def replicated(
        self, info: TensorInfo, place: Stored, data: torch.Tensor, share: Share, unless: torch.Tensor | None = None
    ) -> None:
        self.listed.append(info)
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
                part = None if replica.unless is None else replica.unless.detach().reshape(-1)[lo:hi]
                self._add(replica.info, replica.place, lo, hi, replica.data.detach().reshape(-1)[lo:hi], part)


def contribution(
    engine: Any,
    options: Options,
    read_names: Callable[[], ModuleNames],
    *,
    client_state: Mapping[str, Any],
    exclude_frozen: bool,
    announced: Message,
) -> Contribution:
    """Return the contribution of this rank to the checkpoint.

    Args:
        engine: the DeepSpeedEngine.
        options: options of the ``unickpt`` key.
        read_names: returns ``names_of(engine)``. It fails on a job that is not supported.
        client_state: state of the caller. The checkpoint stores the coordinator's for the job, and that of another rank
            for that rank if it differs.
        exclude_frozen: leave out parameters that do not require a gradient.
        announced: result of ``announcement`` on the coordinator.

    Raises:
        UnsupportedLayoutError: the job uses a layout that unickpt does not support.
    """
    require_supported(engine)
    names = read_names()
    parts = partitions.partitions(engine)
    base = internals.base_optimizer(engine)
    placed = partitions.placement(engine, names.experts.values())
    out = _Tensors()
    slices = tensor_parallel.slices(engine)
    _optimized(out, parts, names, slices, base, placed)
    excluded = _others(out, parts, names, slices, exclude_frozen, placed)
    _buffers(out, options, names, placed)
    out.share()
    record = None if base is None else record_of(parts, names, base)
    rank_objects: dict[str, Any] = {"rng": rng.capture()}
    if engine.global_rank and client_state_digest(client_state) != announced.get("client_state"):
        rank_objects["client_state"] = dict(client_state)
    scalars = RankScalars.of(parts, names, base) if base is not None and _of_parts(parts, slices) else None
    if scalars is not None:
        rank_objects[SCALARS] = scalars.to_object()
    return Contribution(
        shards=out.shards,
        tensors=out.listed,
        rank_objects=rank_objects,
        step=int(engine.global_steps),
        writer=writer(engine, names),
        optimizer=record,
        optimizer_part=_part(record, names, placed),
        aliases=names.aliases if placed.first else {},
        excluded=excluded if placed.first else (),
        objects=_objects(engine, names, client_state) if placed.rank == 0 else {},
        shared_objects={
            **(_shared_states(names, placed) if placed.rank else {}),
            **({} if base is None else owned_states.captured(parts, names, slices, base, placed)),
            **_vocabularies(engine, names, client_state, placed),
        },
        different=_different(engine, options, names, scalars, announced) if placed.rank and placed.with_coordinator else (),
        replica=None if placed.part is None else (placed.part, _fingerprint(parts, base)),
    )


def _of_parts(parts: Sequence[Partition], slices: Slices) -> bool:
    """Whether the optimizer steps on parts of parameters on this rank, so that the ranks may have other scalars."""
    if not all(part.replicated for part in parts):
        return True
    return not all(slices.of(parameter).replicated for part in parts for parameter in part.parameters)


def names_of(engine: Any) -> ModuleNames:
    """Return the names of an engine's module, with this tensor-parallel rank's own values."""
    return ModuleNames.read(engine.module, tensor_parallel.rank_values(engine))


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


def announcement(engine: Any, options: Options, names: Callable[[], ModuleNames], client_state: Mapping[str, Any]) -> Message:
    """Return digests of the coordinator's state. Other ranks compare them with their own to find values that differ."""
    found: Message = {"client_state": client_state_digest(client_state)}
    with contextlib.suppress(Exception):  # ``contribution`` raises the same error on all ranks
        found["replicas"] = "".join(fingerprints([p.detach() for _, p in _tensor_parallel_replicas(engine, names())]))
        found["buffers"] = "".join(fingerprints([buffer for _, buffer in _stored_buffers(names(), options)]))
        parts, base = partitions.partitions(engine), internals.base_optimizer(engine)
        if base is not None and _of_parts(parts, tensor_parallel.slices(engine)):
            found[SCALARS] = RankScalars.of(parts, names(), base).fingerprint()
    return found


def _different(
    engine: Any, options: Options, names: ModuleNames, scalars: RankScalars | None, announced: Message
) -> tuple[tuple[str, str], ...]:
    """Return what differs between this rank and the coordinator, each with the consequence for a load."""
    found = []
    buffers, replicas = _stored_buffers(names, options), _tensor_parallel_replicas(engine, names)
    for key, kind, tensors in (("buffers", "buffer", buffers), ("replicas", "parameter", replicas)):
        theirs, ours = announced.get(key, ""), fingerprints([tensor.detach() for _, tensor in tensors])
        if len(theirs) != _DIGITS * len(ours):
            continue
        for at, (name, _) in enumerate(tensors):
            if ours[at] != theirs[_DIGITS * at : _DIGITS * (at + 1)] and 0 in (names.holders(name) or (0,)):
                found.append((f"{kind} {name}", "Rank 0's values are stored. After a load every rank has them."))
    if scalars is not None and SCALARS in announced and scalars.fingerprint() != announced[SCALARS]:
        follows = "With the same layout each rank gets its own values back. With another layout all ranks get rank 0's."
        found.append(("scalars of the optimizer", follows))
    return tuple(found)


def _tensor_parallel_replicas(engine: Any, names: ModuleNames) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that all tensor-parallel ranks should hold alike; () under ZeRO-3, where a rank has a part of them."""
    if tensor_parallel.degree(engine) == 1 or engine.zero_optimization_partition_weights():
        return []
    slices = tensor_parallel.slices(engine)
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


def writer(engine: Any, names: ModuleNames) -> Writer:
    """Return the writer's entry of the manifest."""
    from deepspeed.git_version_info import version

    known = megatron_deepspeed.job_of(engine.module)
    dialect, model = ("huggingface", model_of(engine.module)) if known is None else (known.dialect, known.model)
    return Writer("deepspeed", version, __version__, torch.__version__, dialect, topology(engine, names), model.as_json())


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
        known, stored = {}, {}
        for parameter in part.parameters:
            own = slices.of(parameter)
            known[id(parameter)] = _infos(parameter, names, own.shape, held)
            out.listed += known[id(parameter)].values()
            elsewhere = names.name(parameter) in names.elsewhere
            stored[id(parameter)] = Stored.of(own, stored=part.stored and not elsewhere, across=part.across)
        for key, flat in flats.items():
            for piece in part.own(key):
                data = flat.narrow(0, piece.at, piece.hi - piece.lo)
                info = known[id(piece.parameter)][key]
                place = stored[id(piece.parameter)]
                if part.replicated:
                    out.replicated(info, place, data, placed.share_among(names.holders(info.name)))
                else:
                    out.own(info, place, piece.lo, piece.hi, data)
        for piece in part.pieces:
            info = known[id(piece.parameter)]["weight"]
            if info.name not in names.elsewhere:
                place = stored[id(piece.parameter)]
                _override(out, part, piece, info, place, flats["master"], placed.share_among(names.holders(info.name)))


def _tensor_states(base: torch.optim.Optimizer | None, part: Partition, kinds: ElementStates) -> dict[str, torch.Tensor]:
    state = {} if base is None else states_of(base, part)
    return {key: value for key, value in state.items() if key in kinds.tensors and value is not None}


def _infos(
    parameter: torch.nn.Parameter, names: ModuleNames, shape: tuple[int, ...], held: Mapping[str, torch.Tensor]
) -> dict[str, TensorInfo]:
    name = names.name(parameter)
    infos = {
        key: TensorInfo(name, key, name_of(tensor.dtype), shape, "parameter" if key == "master" else "optimizer")
        for key, tensor in held.items()
    }
    infos["weight"] = TensorInfo(name, "weight", name_of(parameter.dtype), shape, "parameter", derived_from="master")
    return infos


def _override(
    out: _Tensors, part: Partition, piece: ParameterRange, info: TensorInfo, place: Stored, master: torch.Tensor, share: Share
) -> None:
    """Add a weight that is not the cast of its master, because the user changed it after the last step."""
    weight = part.weight_of(piece)
    if weight is None:
        return
    master = master.narrow(0, piece.at, piece.hi - piece.lo)
    if part.replicated:
        out.replicated(info, place, weight, share, unless=master)
    else:
        out.own(info, place, piece.lo, piece.hi, weight, unless=master)


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
            out.own(info, place, held.lo, held.hi, held.data)
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
