"""A DeepSpeed engine, as this rank's contribution to a checkpoint. Reads only; communicates nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_unickpt import internals
from ds_unickpt.config import Options
from ds_unickpt.huggingface import model_of
from ds_unickpt.internals import Partition, Piece
from unickpt import __version__, objects, rng
from unickpt.contribution import Contribution, Shard, shards_of_flat_range
from unickpt.coordination import Message
from unickpt.dtypes import name_of
from unickpt.errors import UnsupportedLayoutError
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.planning import share_of_replicas

# Switches of the implementation and DeepSpeed's own bookkeeping: never carried from job to job.
NOT_HYPERPARAMETERS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "name", "moe", "step", "_ds_source_param_group_id"}
)


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters of a module by name.

    Attributes:
        of: id(parameter) -> the first of its names, under which it is stored.
        parameters: that name -> parameter, in module order.
        aliases: further names of tied parameters -> the first.
    """

    of: dict[int, str]
    parameters: dict[str, torch.nn.Parameter]
    aliases: dict[str, str]

    @classmethod
    def read(cls, module: torch.nn.Module) -> Names:
        of: dict[int, str] = {}
        parameters: dict[str, torch.nn.Parameter] = {}
        aliases: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in of:
                aliases[name] = of[id(parameter)]
            else:
                of[id(parameter)] = name
                parameters[name] = parameter
        return cls(of, parameters, aliases)

    def name(self, parameter: torch.nn.Parameter) -> str:
        """The stored name. Raises UnsupportedLayoutError for a parameter that the module does not have."""
        try:
            return self.of[id(parameter)]
        except KeyError:
            shape = internals.shape_of(parameter)
            raise UnsupportedLayoutError(f"the optimizer holds a parameter of shape {shape} that the module lacks") from None


def topology(engine: Any) -> dict[str, Any]:
    """Parallel degrees and modes, for the manifest and for reports."""
    dtypes = sorted({name_of(p.dtype) for p in engine.module.parameters()})
    return {
        "world_size": int(engine.seq_dp_world_size),
        "zero_stage": int(engine.zero_optimization_stage()),
        "optimizer_wrapper": internals.wrapper_of(engine),
        "weight_dtypes": dtypes,
    }


@dataclass(frozen=True, slots=True)
class ElementStates:
    """How an optimizer's state divides: tensors of the parameter's shape, and scalars."""

    tensors: frozenset[str]
    scalars: frozenset[str]


def classify(partitions: Sequence[Partition], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> ElementStates:
    """Sort the keys of an optimizer's state.

    A key is elementwise if its values have the shape of what they belong to. A one-element
    parameter leaves that open (``step`` of a 0-d parameter is 0-d as well); the other parameters
    decide, and if there are none, only ``step`` is a scalar.

    Raises:
        UnsupportedLayoutError: a value is neither (factored or compressed state).
    """
    votes: dict[str, set[str]] = {}
    for partition in partitions:
        for key, value in state.get(partition.master, {}).items():
            if value is None:
                continue
            votes.setdefault(key, set()).add(_nature(key, value, partition.master))
    tensors = {key for key, kinds in votes.items() if "tensor" in kinds or (kinds == {"either"} and key != "step")}
    mixed = [key for key, kinds in votes.items() if {"tensor", "scalar"} <= kinds]
    if mixed:
        raise UnsupportedLayoutError(f"optimizer state {mixed[0]!r} is elementwise for some parameters and scalar for others")
    return ElementStates(frozenset(tensors), frozenset(set(votes) - tensors))


def _nature(key: str, value: Any, master: torch.Tensor) -> str:
    if isinstance(value, (bool, int, float)):
        return "scalar"
    if isinstance(value, torch.Tensor):
        if value.shape == master.shape:
            return "tensor" if master.dim() else "either"
        if value.numel() == 1:
            return "scalar"
        raise UnsupportedLayoutError(
            f"optimizer state {key!r} has shape {tuple(value.shape)} for a tensor of shape {tuple(master.shape)}"
        )
    raise UnsupportedLayoutError(f"optimizer state {key!r} is a {type(value).__name__}")


_Replica = tuple[TensorInfo, torch.Tensor, "torch.Tensor | None"]  # the last one: as ``Shard.unless``


@dataclass
class _Tensors:
    """Collects what this rank writes: its own pieces at once, replicas when all are known."""

    rank: int
    world: int
    shards: list[Shard] = field(default_factory=list)
    listed: list[TensorInfo] = field(default_factory=list)
    replicas: list[_Replica] = field(default_factory=list)

    def own(self, info: TensorInfo, lo: int, hi: int, flat: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        self.listed.append(info)
        self.shards += shards_of_flat_range(info, lo, hi, flat, unless)

    def replicated(self, info: TensorInfo, data: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        self.listed.append(info)
        self.replicas.append((info, data, unless))

    def share(self) -> None:
        """Take this rank's part of the replicas: equal bytes on every rank, by arithmetic.

        Those with a condition apart: as a rule none of them is written.
        """
        self._share([replica for replica in self.replicas if replica[2] is None])
        self._share([replica for replica in self.replicas if replica[2] is not None])

    def _share(self, replicas: list[_Replica]) -> None:
        replicas.sort(key=lambda replica: replica[0].key)
        infos = [info for info, _, _ in replicas]
        ranges = share_of_replicas([i.size_bytes for i in infos], [i.numel for i in infos], rank=self.rank, world=self.world)
        for (info, data, unless), (lo, hi) in zip(replicas, ranges, strict=True):
            if lo < hi:
                part = None if unless is None else unless.detach().reshape(-1)[lo:hi]
                self.shards += shards_of_flat_range(info, lo, hi, data.detach().reshape(-1)[lo:hi], part)


def contribution(
    engine: Any, options: Options, *, client_state: Mapping[str, Any], exclude_frozen: bool, announced: Message
) -> Contribution:
    """Everything that this rank adds to the checkpoint.

    Args:
        engine: the DeepSpeedEngine.
        options: of the ``unickpt`` key.
        client_state: the caller's own state. The coordinator's is the job's; another rank's is kept
            for that rank if it differs.
        exclude_frozen: leave out parameters that do not require a gradient.
        announced: the coordinator's announcement (``announcement``).

    Raises:
        UnsupportedLayoutError: the job's layout cannot be described.
    """
    reason = internals.unsupported_reason(engine)
    if reason:
        raise UnsupportedLayoutError(reason)
    names = Names.read(engine.module)
    parts = internals.partitions(engine)
    base = internals.base_optimizer(engine)
    out = _Tensors(engine.global_rank, engine.seq_dp_world_size)
    _optimized(out, parts, names, base)
    excluded = _others(out, parts, names, exclude_frozen)
    _buffers(out, engine, options)
    out.share()
    rank_objects: dict[str, Any] = {"rng": rng.capture()}
    if engine.global_rank and client_state_digest(client_state) != announced.get("client_state"):
        rank_objects["client_state"] = dict(client_state)
    return Contribution(
        shards=out.shards,
        tensors=out.listed,
        rank_objects=rank_objects,
        step=int(engine.global_steps),
        writer=writer(engine),
        optimizer=None if base is None else _optimizer_record(parts, names, base),
        aliases=names.aliases,
        excluded=excluded,
        objects=_objects(engine, client_state) if engine.global_rank == 0 else {},
    )


def announcement(client_state: Mapping[str, Any]) -> Message:
    """What the coordinator tells the other ranks before they contribute."""
    return {"client_state": client_state_digest(client_state)}


def client_state_digest(client_state: Mapping[str, Any]) -> str:
    """Equal for equal client states, so that replicas of it are recognised without exchanging them."""
    encoded = objects.encode(dict(client_state), prefix="client")
    digest = hashlib.sha256(json.dumps(encoded.value, sort_keys=True).encode())
    for key, tensor in encoded.tensors.items():
        digest.update(key.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def writer(engine: Any) -> Writer:
    """Who writes, for the manifest."""
    from deepspeed.git_version_info import version

    return Writer("deepspeed", version, __version__, torch.__version__, "huggingface", topology(engine),
                  model_of(engine.module).as_json())  # fmt: skip


def _optimized(out: _Tensors, parts: Sequence[Partition], names: Names, base: torch.optim.Optimizer | None) -> None:
    """Masters and optimizer states of what the optimizer holds; weights, for the case that they are not their cast."""
    state = {} if base is None else base.state
    kinds = classify(parts, state)
    for part in parts:
        held = {"master": part.master, **_tensor_states(state.get(part.master, {}), kinds)}
        flats = {key: tensor.detach().reshape(-1) for key, tensor in held.items()}
        known = {id(parameter): _infos(parameter, names, held) for parameter in part.parameters}
        for infos in known.values():
            out.listed += infos.values()
        for piece in part.pieces:
            infos = known[id(piece.parameter)]
            length = piece.hi - piece.lo
            for key, flat in flats.items():
                data = flat.narrow(0, piece.at, length)
                if part.replicated:
                    out.replicated(infos[key], data)
                else:
                    out.own(infos[key], piece.lo, piece.hi, data)
            _override(out, part, piece, infos["weight"], flats["master"])


def _tensor_states(state: Mapping[str, Any], kinds: ElementStates) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key in kinds.tensors and value is not None}


def _infos(parameter: torch.nn.Parameter, names: Names, held: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    name, shape = names.name(parameter), internals.shape_of(parameter)
    infos = {
        key: TensorInfo(name, key, name_of(tensor.dtype), shape, "parameter" if key == "master" else "optimizer")
        for key, tensor in held.items()
    }
    infos["weight"] = TensorInfo(name, "weight", name_of(parameter.dtype), shape, "parameter", derived_from="master")
    return infos


def _override(out: _Tensors, part: Partition, piece: Piece, info: TensorInfo, master: torch.Tensor) -> None:
    """A computing weight is stored if it is not the cast of its master (changed by hand since the last step)."""
    if part.weight is None:
        return
    length = piece.hi - piece.lo
    weight = part.weight.detach().reshape(-1).narrow(0, piece.at, length)
    master = master.narrow(0, piece.at, length)
    if part.replicated:
        out.replicated(info, weight, unless=master)
    else:
        out.own(info, piece.lo, piece.hi, weight, unless=master)


def _others(out: _Tensors, parts: Sequence[Partition], names: Names, exclude_frozen: bool) -> tuple[str, ...]:
    """Parameters outside the optimizer: frozen, empty, or simply not given to it. Returns those excluded."""
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
        held = internals.held(parameter)
        if held is not None and held.replicated:
            out.replicated(info, held.data)
        elif held is not None:
            out.own(info, held.lo, held.hi, held.data)
    return tuple(excluded)


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, buffer, persistent)`` of every distinct buffer."""
    volatile = internals.non_persistent_names(module)
    for name, buffer in module.named_buffers():
        yield name, buffer, name not in volatile


def _buffers(out: _Tensors, engine: Any, options: Options) -> None:
    """Buffers, from the coordinator alone: running statistics differ between ranks and must not be mixed."""
    for name, buffer, persistent in buffers(engine.module):
        if persistent or options.non_persistent_buffers:
            info = TensorInfo(name, "weight", name_of(buffer.dtype), tuple(buffer.shape), "buffer")
            out.listed.append(info)
            if engine.global_rank == 0 and info.numel:
                out.shards.append(Shard(info, Box.whole(info.shape), buffer))


def _optimizer_record(parts: Sequence[Partition], names: Names, base: torch.optim.Optimizer) -> OptimizerRecord:
    """Hyperparameters and scalar state by parameter name."""
    kinds = classify(parts, base.state)
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    scalars: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for part in parts:
        listed = [names.name(p) for p in part.parameters]
        values = {key: value for key, value in part.group.items() if key not in NOT_HYPERPARAMETERS}
        groups.setdefault(id(part.group), (_plain(values), []))[1].extend(listed)
        held = base.state.get(part.master, {})
        scalar = {key: held[key] for key in sorted(kinds.scalars) if held.get(key) is not None}
        if "step" in part.group and "step" not in scalar:  # apex-style optimizers count in the group
            scalar["step"] = part.group["step"]
        encoded = _plain(scalar)
        scalars.setdefault(json.dumps(encoded, sort_keys=True), (encoded, []))[1].extend(listed)
    return OptimizerRecord(
        type(base).__name__,
        tuple(ParameterGroup(values, tuple(dict.fromkeys(listed))) for values, listed in groups.values()),
        tuple(ParameterGroup(values, tuple(dict.fromkeys(listed))) for values, listed in scalars.values() if values),
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Encoded values with 0-d tensors (capturable learning rates, steps) as plain numbers."""
    numbers = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in values.items()}
    encoded = objects.encode(numbers, prefix="optimizer")
    if encoded.tensors or encoded.opaque:
        raise UnsupportedLayoutError(f"hyperparameters hold more than plain values: {encoded.opaque or list(encoded.tensors)}")
    plain: dict[str, Any] = encoded.value
    return plain


def _objects(engine: Any, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """The job's non-tensor state, as DeepSpeed itself would save it."""
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
        "module_extra_state": {
            name: child.get_extra_state()
            for name, child in engine.module.named_modules()
            if type(child).get_extra_state is not torch.nn.Module.get_extra_state
        },
    }
    found |= {key: None if value is None else value.state_dict() for key, value in internals.extra_states(engine).items()}
    return found


def _named_state(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": scheduler.state_dict()}
