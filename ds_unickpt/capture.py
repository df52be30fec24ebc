"""Captures the state of a DeepSpeed engine as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_unickpt import internals, partitions
from ds_unickpt import names as names_module
from ds_unickpt.huggingface import model_of
from ds_unickpt.names import ModuleNames
from ds_unickpt.optimizer_record import ElementStates, RankScalars, classify, record_of
from ds_unickpt.partitions import ParameterRange, Partition, states_of
from ds_unickpt.placement import Placement, Share
from unickpt import __version__
from unickpt.coordination.rendezvous import Message
from unickpt.errors import UnsupportedLayoutError
from unickpt.format import objects
from unickpt.format.boxes import Box
from unickpt.format.checksums import digest
from unickpt.format.dtypes import name_of
from unickpt.format.index import TensorInfo
from unickpt.format.manifest import Writer
from unickpt.load import rng
from unickpt.load.read_plan import share_of_replicas
from unickpt.options import Options
from unickpt.save.fingerprints import fingerprints
from unickpt.save.shards import Contribution, Shard, shards_of_flat_range

EXTRA_STATE = "module_extra_state"  # key in the objects of the job; the shared objects of further pipeline stages start with it
MICRO_BATCHES = "pipeline_micro_batches"  # key in the objects of the job
SCALARS = "scalars"  # key in the objects of a rank and in the announcement
_DIGITS = 16  # hex digits of a fingerprint


def topology(engine: Any) -> dict[str, Any]:
    """Return parallel degrees and modes, for the manifest and for reports."""
    dtypes = sorted({name_of(p.dtype) for p in engine.module.parameters()})
    sequence = int(getattr(engine, "sequence_parallel_size", 1))
    placed = partitions.placement(engine)
    return {
        "world_size": int(engine.world_size),
        "zero_stage": int(engine.zero_optimization_stage()),
        "optimizer_wrapper": internals.wrapper_of(engine),
        "weight_dtypes": dtypes,
        **({"sequence": sequence} if sequence > 1 else {}),
        **({"pipeline": placed.stages, "data": len(placed.data)} if placed.stages > 1 else {}),
    }


@dataclass(frozen=True, slots=True)
class _Replica:
    """A tensor that the ranks of ``share`` hold. ``unless`` is that of ``Shard``."""

    info: TensorInfo
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
        self, info: TensorInfo, lo: int, hi: int, flat: torch.Tensor, unless: torch.Tensor | None = None, *, stored: bool = True
    ) -> None:
        self.listed.append(info)
        if stored:
            self.shards += shards_of_flat_range(info, lo, hi, flat, unless)

    def replicated(
        self, info: TensorInfo, data: torch.Tensor, share: Share, unless: torch.Tensor | None = None, *, stored: bool = True
    ) -> None:
        self.listed.append(info)
        if stored:
            self.replicas.append(_Replica(info, data, unless, share))

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
        infos = [replica.info for replica in replicas]
        ranges = share_of_replicas([i.size_bytes for i in infos], [i.numel for i in infos], rank=share.rank, world=share.world)
        for replica, (lo, hi) in zip(replicas, ranges, strict=True):
            if lo < hi:
                part = None if replica.unless is None else replica.unless.detach().reshape(-1)[lo:hi]
                self.shards += shards_of_flat_range(replica.info, lo, hi, replica.data.detach().reshape(-1)[lo:hi], part)


def contribution(
    engine: Any, options: Options, *, client_state: Mapping[str, Any], exclude_frozen: bool, announced: Message
) -> Contribution:
    """Return the contribution of this rank to the checkpoint.

    Args:
        engine: the DeepSpeedEngine.
        options: options of the ``unickpt`` key.
        client_state: state of the caller. The checkpoint stores the coordinator's for the job, and that of another rank
            for that rank if it differs.
        exclude_frozen: leave out parameters that do not require a gradient.
        announced: result of ``announcement`` on the coordinator.

    Raises:
        UnsupportedLayoutError: the job uses a layout that unickpt does not support.
    """
    reason = internals.unsupported_reason(engine)
    if reason:
        raise UnsupportedLayoutError(reason)
    names = ModuleNames.read(engine.module)
    parts = partitions.partitions(engine)
    base = internals.base_optimizer(engine)
    placed = partitions.placement(engine)
    out = _Tensors()
    _optimized(out, parts, names, base, placed)
    excluded = _others(out, parts, names, exclude_frozen, placed)
    _buffers(out, engine, options, placed)
    out.share()
    record = None if base is None else record_of(parts, names, base)
    rank_objects: dict[str, Any] = {"rng": rng.capture()}
    if engine.global_rank and client_state_digest(client_state) != announced.get("client_state"):
        rank_objects["client_state"] = dict(client_state)
    scalars = None if base is None or all(part.replicated for part in parts) else RankScalars.of(parts, names, base)
    if scalars is not None:
        rank_objects[SCALARS] = scalars.to_object()
    return Contribution(
        shards=out.shards,
        tensors=out.listed,
        rank_objects=rank_objects,
        step=int(engine.global_steps),
        writer=writer(engine),
        optimizer=record,
        optimizer_part=record if placed.first else None,
        aliases=names.aliases if placed.first else {},
        excluded=excluded if placed.first else (),
        objects=_objects(engine, client_state) if placed.rank == 0 else {},
        shared_objects=_shared_states(engine) if placed.first and placed.rank else {},
        different=_different(engine, options, scalars, announced) if placed.rank and placed.with_coordinator else (),
        replica=None if placed.part is None else (placed.part, _fingerprint(parts, base)),
    )


def announcement(engine: Any, options: Options, client_state: Mapping[str, Any]) -> Message:
    """Return digests of the coordinator's state. Other ranks compare them with their own to find values that differ."""
    found: Message = {"client_state": client_state_digest(client_state)}
    with contextlib.suppress(Exception):  # ``contribution`` raises the same error on all ranks
        found["buffers"] = "".join(fingerprints([buffer for _, buffer in _stored_buffers(engine, options)]))
        parts, base = partitions.partitions(engine), internals.base_optimizer(engine)
        if base is not None and not all(part.replicated for part in parts):
            found[SCALARS] = RankScalars.of(parts, ModuleNames.read(engine.module), base).fingerprint()
    return found


def _different(engine: Any, options: Options, scalars: RankScalars | None, announced: Message) -> tuple[tuple[str, str], ...]:
    """Return what differs between this rank and the coordinator, each with the consequence for a load."""
    found = []
    buffers = _stored_buffers(engine, options)
    theirs, ours = announced.get("buffers", ""), fingerprints([buffer for _, buffer in buffers])
    if len(theirs) == _DIGITS * len(ours):
        for at, (name, _) in enumerate(buffers):
            if ours[at] != theirs[_DIGITS * at : _DIGITS * (at + 1)]:
                found.append((f"buffer {name}", "Rank 0's values are stored. After a load every rank has them."))
    if scalars is not None and SCALARS in announced and scalars.fingerprint() != announced[SCALARS]:
        follows = "With the same layout each rank gets its own values back. With another layout all ranks get rank 0's."
        found.append(("scalars of the optimizer", follows))
    return tuple(found)


def _fingerprint(parts: Sequence[Partition], base: torch.optim.Optimizer | None) -> str:
    """Return a fingerprint of this rank's masters and optimizer states. It is equal on replicas.

    The padding of a partition is left out. ZeRO-3 does not initialise it (``partition_parameters.py``, ``_partition_param``).
    """
    tensors = []
    for part in parts:
        state = states_of(base, part) if base is not None else {}
        tensors += _held_elements(part, "master", part.master)
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                tensors += _held_elements(part, key, value)
    return digest("".join(fingerprints(tensors)).encode())


def _held_elements(part: Partition, key: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of a state that belong to parameters; the whole tensor if it is not elementwise."""
    if key not in part.whole and value.numel() != part.master.numel():
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


def writer(engine: Any) -> Writer:
    """Return the writer's entry of the manifest."""
    from deepspeed.git_version_info import version

    return Writer("deepspeed", version, __version__, torch.__version__, "huggingface", topology(engine),
                  model_of(engine.module).as_json())  # fmt: skip


def _optimized(
    out: _Tensors, parts: Sequence[Partition], names: ModuleNames, base: torch.optim.Optimizer | None, placed: Placement
) -> None:
    """Add masters and optimizer states. Also add the weights that are not the cast of their masters."""
    kinds = classify(parts, base)
    for part in parts:
        held = {"master": part.master, **_tensor_states(base, part, kinds)}
        flats = {key: tensor.detach().reshape(-1) for key, tensor in held.items()}
        known = {id(parameter): _infos(parameter, names, held) for parameter in part.parameters}
        for infos in known.values():
            out.listed += infos.values()
        for key, flat in flats.items():
            for piece in part.own(key):
                data = flat.narrow(0, piece.at, piece.hi - piece.lo)
                info = known[id(piece.parameter)][key]
                stored = part.stored and info.name not in names.elsewhere
                if part.replicated:
                    out.replicated(info, data, placed.share, stored=stored)
                else:
                    out.own(info, piece.lo, piece.hi, data, stored=stored)
        for piece in part.pieces:
            info = known[id(piece.parameter)]["weight"]
            if info.name not in names.elsewhere:
                _override(out, part, piece, info, flats["master"], placed)


def _tensor_states(base: torch.optim.Optimizer | None, part: Partition, kinds: ElementStates) -> dict[str, torch.Tensor]:
    state = {} if base is None else states_of(base, part)
    return {key: value for key, value in state.items() if key in kinds.tensors and value is not None}


def _infos(parameter: torch.nn.Parameter, names: ModuleNames, held: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    name, shape = names.name(parameter), internals.shape_of(parameter)
    infos = {
        key: TensorInfo(name, key, name_of(tensor.dtype), shape, "parameter" if key == "master" else "optimizer")
        for key, tensor in held.items()
    }
    infos["weight"] = TensorInfo(name, "weight", name_of(parameter.dtype), shape, "parameter", derived_from="master")
    return infos


def _override(
    out: _Tensors, part: Partition, piece: ParameterRange, info: TensorInfo, master: torch.Tensor, placed: Placement
) -> None:
    """Add a weight that is not the cast of its master, because the user changed it after the last step."""
    if part.weight is None:
        return
    length = piece.hi - piece.lo
    weight = part.weight.detach().reshape(-1).narrow(0, piece.at, length)
    master = master.narrow(0, piece.at, length)
    if part.replicated:
        out.replicated(info, weight, placed.share, unless=master)
    else:
        out.own(info, piece.lo, piece.hi, weight, unless=master, stored=part.stored)


def _others(
    out: _Tensors, parts: Sequence[Partition], names: ModuleNames, exclude_frozen: bool, placed: Placement
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
        info = TensorInfo(name, "weight", name_of(parameter.dtype), internals.shape_of(parameter), "parameter")
        out.listed.append(info)
        held = partitions.held(parameter)
        if held is not None and held.replicated:
            out.replicated(info, held.data, placed.share, stored=name not in names.elsewhere)
        elif held is not None:
            out.own(info, held.lo, held.hi, held.data, stored=held.stored)
    return tuple(excluded)


def _stored_buffers(engine: Any, options: Options) -> list[tuple[str, torch.Tensor]]:
    found = names_module.buffers(engine.module)
    return [(name, buffer) for name, buffer, persistent in found if persistent or options.non_persistent_buffers]


def _buffers(out: _Tensors, engine: Any, options: Options, placed: Placement) -> None:
    """Add the buffers of the first peer. Running statistics differ between ranks, so parts of several ranks do not fit."""
    for name, buffer in _stored_buffers(engine, options):
        info = TensorInfo(name, "weight", name_of(buffer.dtype), tuple(buffer.shape), "buffer")
        out.listed.append(info)
        if placed.first and info.numel:
            out.shards.append(Shard(info, Box.whole(info.shape), buffer))


def _objects(engine: Any, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-tensor state of the job, which is what DeepSpeed itself saves."""
    scaler, grad_scaler = internals.loss_scaler(engine), internals.grad_scaler(engine)
    scheduler = internals.lr_scheduler(engine)
    found: dict[str, Any] = {
        "client_state": dict(client_state),
        "engine": {key: int(getattr(engine, key)) for key in ("global_steps", "global_samples", "skipped_steps")},
        "ds_config": dict(internals.config_of(engine)),
        "lr_scheduler": _named_state(scheduler),
        "loss_scaler": None
        if scaler is None
        else {k: getattr(scaler, k) for k in internals.SCALER_FIELDS if hasattr(scaler, k)},
        "grad_scaler": None if grad_scaler is None else grad_scaler.state_dict(),
        EXTRA_STATE: _extra_states(engine),
    }
    if engine.pipeline_parallelism:
        found[MICRO_BATCHES] = internals.micro_batches(engine)
    found |= {key: None if value is None else value.state_dict() for key, value in internals.extra_states(engine).items()}
    return found


def _named_state(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def _extra_states(engine: Any) -> dict[str, Any]:
    """Return ``get_extra_state`` of the modules of this rank, by the stored name of the module."""
    return {
        name: child.get_extra_state()
        for name, child in names_module.modules(engine.module)
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state
    }


def _shared_states(engine: Any) -> dict[str, Any]:
    return {f"{EXTRA_STATE}/{name}": state for name, state in _extra_states(engine).items()}
