"""What DeepSpeed's optimizers hold on one rank, with no communication. Private attributes of DeepSpeed, as in ``internals``.

What comes out is framework-neutral: *partitions*, tensors that the optimizer steps on, each with
the parameter ranges that lie in it. How ZeRO lays them out was read from DeepSpeed's sources and
verified against live weights (named per function); ``ds_unickpt/hooks.py`` says for which versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist
from torch.distributed import get_process_group_ranks

from ds_unickpt.internals import BF16, FP16_FUSED, FP16_UNFUSED, ZERO_1_2, ZERO_3, is_zero3, wrapper_of
from unickpt.errors import UnsupportedLayoutError


@dataclass(frozen=True, slots=True)
class Piece:
    """Flat range ``[lo, hi)`` of a parameter, at element ``at`` of a flat tensor."""

    parameter: torch.nn.Parameter
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One tensor that the optimizer steps on, on this rank.

    Attributes:
        master: the key of the optimizer's state: a flat 1-D tensor, or (without ZeRO) a tensor of
            the parameter's shape.
        weight: what the model computes with, elementwise beside ``master``; None if it is ``master``.
        pieces: the parameter ranges in it that this rank holds; the rest of a flat one is padding.
        parameters: all parameters of the partitioned group, also those that lie on other ranks.
        group: the optimizer's parameter group (a live dict).
        replicated: every rank holds the same.
        stored: this rank's copy is the one to store. Of sequence-parallel peers, who hold the same
            partition each, only one stores it.
        whole: states whose tensor holds whole parameters back to back, instead of lying elementwise
            beside ``master``: key -> their places in it.
    """

    master: torch.Tensor
    weight: torch.Tensor | None
    pieces: tuple[Piece, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    group: MutableMapping[str, Any]
    replicated: bool
    stored: bool = True
    whole: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)

    def held(self, state: str) -> tuple[Piece, ...]:
        """What this rank holds of a state, with the places in the state's tensor."""
        return self.whole.get(state, self.pieces)

    def own(self, state: str) -> tuple[Piece, ...]:
        """The part of it that no other partition has."""
        if state not in self.whole:
            return self.pieces
        at = {id(piece.parameter): piece.at for piece in self.whole[state]}
        return tuple(Piece(p.parameter, p.lo, p.hi, at[id(p.parameter)] + p.lo) for p in self.pieces)

    def shape(self, state: str) -> tuple[int, ...]:
        """Shape of a state's tensor, if the state is elementwise."""
        whole = self.whole.get(state)
        return tuple(self.master.shape) if whole is None else (sum(piece.hi for piece in whole),)


def partitions(engine: Any) -> list[Partition]:
    """What the optimizer holds on this rank, with no communication.

    Raises:
        UnsupportedLayoutError: the buffers are not laid out as the known versions lay them out.
    """
    kind = wrapper_of(engine)
    if kind == "none":
        return []
    build = {
        "plain": _plain,
        ZERO_1_2: _zero_1_2,
        ZERO_3: _zero_3,
        BF16: _bf16,
        FP16_FUSED: _fp16_fused,
        FP16_UNFUSED: _fp16_unfused,
    }[kind]
    found = list(build(engine.optimizer))
    for partition in found:
        _check(partition)
    return found


def _check(partition: Partition) -> None:
    size = partition.master.numel()
    for state, whole in partition.whole.items():
        if {id(piece.parameter) for piece in partition.pieces} - {id(piece.parameter) for piece in whole}:
            raise UnsupportedLayoutError(f"a partition has a part of a parameter that its {state} does not have")
    for piece in partition.pieces:
        if piece.at < 0 or piece.at + piece.hi - piece.lo > size:
            raise UnsupportedLayoutError(f"a parameter range ends at {piece.at + piece.hi - piece.lo} of a partition of {size}")
    if partition.weight is not None and partition.weight.numel() != size:
        raise UnsupportedLayoutError(f"weights of {partition.weight.numel()} elements beside masters of {size}")


MOMENTUM = "momentum_buffer"
_OFFLOADED = "_offload_buffer"


def states_of(optimizer: torch.optim.Optimizer, partition: Partition) -> dict[str, Any]:
    """An optimizer's state of one partition, without the copies that DeepSpeed's offload leaves in it."""
    state = optimizer.state.get(partition.master, {})
    return {k: v for k, v in state.items() if not (k.endswith(_OFFLOADED) and k.removesuffix(_OFFLOADED) in state)}


def new_state(engine: Any, partition: Partition, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Zeros for an elementwise state that the optimizer does not have yet.

    Args:
        dtype: of the state, unless DeepSpeed wants another one for it.
    """
    kind, optimizer = wrapper_of(engine), engine.optimizer
    base = optimizer if kind == "plain" else optimizer.optimizer
    if key == MOMENTUM and "muon" in type(base).__name__.lower() and key not in partition.whole:
        # as in ``_create_momentum_buffer`` of runtime/zero/stage3.py, and beside the masters of the others
        dtype = optimizer.communication_data_type if kind == ZERO_3 else partition.master.dtype
    shape = partition.shape(key)
    if shape == tuple(partition.master.shape):
        tensor = torch.zeros_like(partition.master, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=partition.master.device)
    state = base.state
    state[partition.master][key] = tensor
    if kind == ZERO_3 and key in ("exp_avg", "exp_avg_sq") and "optim_states" in _offloaded(optimizer):
        state[partition.master][key + _OFFLOADED] = tensor  # ``reload_states`` looks for it there
    return tensor


def _offloaded(optimizer: Any) -> set[str]:
    return {state.value for state in getattr(optimizer, "offloaded_states", ())}


def reload_states(engine: Any) -> Callable[[], None]:
    """Bring back what ``engine.offload_states`` took away; returns what takes the same away again."""
    optimizer = engine.optimizer
    away = list(getattr(optimizer, "offloaded_states", ()))
    if not away:
        return lambda: None
    buffers = ("hp_params_pin_buffers", "lp_params_pin_buffers", "lp_param_contiguous_pin_buffer")
    pinned = any(hasattr(optimizer, name) for name in (*buffers, "lp_grad_partitions_flat_pin_buffers"))
    engine.reload_states()
    return lambda: engine.offload_states(include=away, pin_memory=pinned)


def _plain(optimizer: torch.optim.Optimizer) -> Iterator[Partition]:
    """No wrapper (fp32 without ZeRO): the optimizer steps on the parameters themselves."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield Partition(p, None, (Piece(p, 0, p.numel(), 0),), (p,), group, replicated=True)


def _fp16_unfused(optimizer: Any) -> Iterator[Partition]:
    """runtime/fp16/unfused_optimizer.py: ``fp16_groups[g][i]`` beside ``fp32_groups[g][i]``."""
    for g, group in enumerate(optimizer.optimizer.param_groups):
        for p, master in zip(optimizer.fp16_groups[g], optimizer.fp32_groups[g], strict=True):
            yield Partition(master, p, (Piece(p, 0, p.numel(), 0),), (p,), group, replicated=True)


def _fp16_fused(optimizer: Any) -> Iterator[Partition]:
    """runtime/fp16/fused_optimizer.py: parameters of a group back to back in ``fp32_groups_flat[g]``."""
    for g, group in enumerate(optimizer.optimizer.param_groups):
        params = tuple(optimizer.fp16_groups[g])
        pieces, at = [], 0
        for p in params:
            pieces.append(Piece(p, 0, p.numel(), at))
            at += p.numel()
        yield Partition(
            optimizer.fp32_groups_flat[g], optimizer.fp16_groups_flat[g], tuple(pieces), params, group, replicated=True
        )


def _zero_1_2(optimizer: Any) -> Iterator[Partition]:
    """runtime/zero/stage_1_and_2.py: this rank owns one equal part of the padded, reordered group."""
    offsets_of_group = getattr(optimizer, "round_robin_bit16_offsets", None)
    for g, params in enumerate(optimizer.round_robin_bit16_groups):
        numels = [meta.numel() for meta in optimizer.round_robin_bit16_meta[g]]
        process_group = optimizer.real_dp_process_group[g]
        rank = dist.get_rank(group=process_group)
        master = optimizer.single_partition_of_fp32_groups[g]
        yield Partition(
            master,
            _bit16_partition(optimizer, g, rank),
            _slice_of_group(params, numels, offsets_of_group[g] if offsets_of_group else None, rank, master.numel()),
            tuple(params),
            _group_of(optimizer.optimizer, master, g),
            replicated=False,
            stored=_is_stored(process_group),
            whole=_whole_states(optimizer, g),
        )


def _is_stored(process_group: Any) -> bool:
    """Whether the partitions of this group are the ones to store.

    Groups that do not span the job are copies of each other: with a mesh of data and sequence
    parallelism DeepSpeed partitions over the data-parallel ranks alone. The group with rank 0 stores.
    """
    return 0 in get_process_group_ranks(process_group)


def _bit16_partition(optimizer: Any, g: int, rank: int) -> torch.Tensor:
    """``offload_states`` empties the lists of partitions, and keeps the flat buffer that they lie in."""
    partitions = optimizer.parallel_partitioned_bit16_groups[g]
    if not partitions:
        partitions = optimizer.get_data_parallel_partitions(optimizer.bit16_groups_flat[g], g)
    found: torch.Tensor = partitions[rank]
    return found


def _whole_states(optimizer: Any, g: int) -> dict[str, tuple[Piece, ...]]:
    """Muon orthogonalizes whole matrices, so a rank keeps the momentum of all that its partition has a part of.

    ``_muon_momentum_buffer`` of runtime/zero/stage_1_and_2.py. With offload, the momentum lies beside the master.
    """
    params = optimizer.params_in_partition[g]
    muon = "muon" in type(optimizer.optimizer).__name__.lower()
    if not muon or optimizer.cpu_offload or not params or not getattr(params[0], "use_muon", False):
        return {}
    pieces, at = [], 0
    for p in params:
        pieces.append(Piece(p, 0, p.numel(), at))
        at += p.numel()
    return {MOMENTUM: tuple(pieces)}


def _bf16(optimizer: Any) -> Iterator[Partition]:
    """runtime/bf16_optimizer.py: as ZeRO-1, without reordering."""
    for g, params in enumerate(optimizer.bf16_groups):
        process_group = optimizer.real_dp_process_group[g]
        rank = dist.get_rank(group=process_group)
        master = optimizer.fp32_groups_flat_partition[g]
        yield Partition(
            master,
            optimizer.bf16_partitioned_groups[g][rank],
            _slice_of_group(params, [p.numel() for p in params], None, rank, master.numel()),
            tuple(params),
            _group_of(optimizer.optimizer, master, g),
            replicated=False,
            stored=_is_stored(process_group),
        )


def _slice_of_group(
    params: list[torch.nn.Parameter], numels: list[int], offsets: list[int] | None, rank: int, size: int
) -> tuple[Piece, ...]:
    begin, end = rank * size, (rank + 1) * size
    pieces, next_offset = [], 0
    for at, (p, numel) in enumerate(zip(params, numels, strict=True)):
        offset = next_offset if offsets is None else offsets[at]
        next_offset = offset + numel
        lo, hi = max(offset, begin), min(offset + numel, end)
        if lo < hi:
            pieces.append(Piece(p, lo - offset, hi - offset, lo - begin))
    return tuple(pieces)


def _zero_3(optimizer: Any) -> Iterator[Partition]:
    """runtime/zero/stage3.py: every parameter is cut into equal parts; parts lie back to back per sub-group."""
    groups = getattr(optimizer, "sub_group_process_groups", None)
    weights = _zero_3_weights(optimizer)
    for s, params in enumerate(optimizer.fp16_groups):
        process_group = groups[s] if groups else getattr(params[0], "ds_process_group", optimizer.dp_process_group)
        rank = dist.get_rank(group=process_group)
        pieces, at = [], 0
        for p in params:
            pieces += [Piece(p, lo, hi, at) for lo, hi in _zero3_range(p, rank)]
            at += p.partition_numel()
        master = optimizer.fp32_partitioned_groups_flat[s]
        if master.numel() != at:
            raise UnsupportedLayoutError(f"ZeRO-3 sub-group {s} holds {master.numel()} elements, its parameters have {at}")
        weight = weights[s]
        same = weight is None or weight.data_ptr() == master.data_ptr()
        group = _group_of(optimizer.optimizer, master, optimizer.sub_group_to_group_id[s])
        yield Partition(
            master,
            None if same else weight,
            tuple(pieces),
            tuple(params),
            group,
            replicated=False,
            stored=_is_stored(process_group),
        )


def _zero_3_weights(optimizer: Any) -> list[torch.Tensor | None]:
    """``offload_states`` empties the list of sub-groups, and keeps the buffer that they lie in (``reload_states``)."""
    weights: list[torch.Tensor | None] = list(optimizer.fp16_partitioned_groups_flat)
    if weights or not optimizer.fp16_groups:
        return weights
    at = 0
    for numel in optimizer.fp16_partitioned_groups_flat_numel:
        weights.append(optimizer.lp_param_buffer.narrow(0, at, numel))
        at += numel
    return weights


def _zero3_range(parameter: Any, rank: int) -> list[tuple[int, int]]:
    size = parameter.partition_numel()
    lo = min(rank * size, parameter.ds_numel)
    hi = min(lo + size, parameter.ds_numel)
    return [(lo, hi)] if lo < hi else []


def _group_of(optimizer: torch.optim.Optimizer, master: torch.Tensor, position: int) -> MutableMapping[str, Any]:
    """The group that holds ``master`` (DeepSpeed rebuilds Adagrad with one group), else the one at that position."""
    for group in optimizer.param_groups:
        if any(p is master for p in group["params"]):
            return group
    return optimizer.param_groups[min(position, len(optimizer.param_groups) - 1)]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter outside the optimizer, as far as this rank holds it.

    ``data`` is a 1-D tensor (a live view where ``live``) of the flat range ``[lo, hi)``. ``stored`` as in ``Partition``.
    """

    lo: int
    hi: int
    data: torch.Tensor
    live: bool
    replicated: bool
    stored: bool = True


def held(parameter: Any) -> Held | None:
    """What this rank holds of a parameter: all of it, or its ZeRO-3 part; None if it holds nothing."""
    if not is_zero3(parameter):
        data = parameter.detach()
        return Held(0, data.numel(), data.reshape(-1), data.is_contiguous(), replicated=True)
    ranges = _zero3_range(parameter, dist.get_rank(group=parameter.ds_process_group))
    if not ranges:
        return None
    lo, hi = ranges[0]
    if parameter.ds_tensor.numel() < hi - lo:
        raise UnsupportedLayoutError(f"a ZeRO-3 partition of {parameter.ds_tensor.numel()} elements for a range of {hi - lo}")
    return Held(lo, hi, parameter.ds_tensor.detach().narrow(0, 0, hi - lo), live=True, replicated=False,
                stored=_is_stored(parameter.ds_process_group))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """Who stores what every rank holds alike.

    Attributes:
        rank, world: this rank among those that share it out; ``rank`` is -1 for one that stores nothing.
        part: where several data-parallel groups hold a copy of the job's state each: the number of this rank's
            part of it. Ranks with the same part hold the same values. None where there is one copy.
    """

    rank: int
    world: int
    part: int | None


def share(engine: Any) -> Share:
    """The ranks of the data-parallel group with rank 0.

    Sequence-parallel peers of a mesh are meant to hold the same values. DeepSpeed 0.19 does not reduce their
    gradients under ZeRO 0 to 2, so they may not: one of them stores all, rather than each a part.
    """
    ranks = get_process_group_ranks(engine.seq_data_parallel_group)
    rank = ranks.index(engine.global_rank)
    part = rank if len(ranks) < engine.world_size else None
    return Share(rank if 0 in ranks else -1, len(ranks), part)


def refresh_weights(engine: Any) -> None:
    """After the masters have changed: make the computing weights their cast. Collective under ZeRO-1/2."""
    kind, optimizer = wrapper_of(engine), engine.optimizer
    if kind in (ZERO_1_2, BF16):
        optimizer.update_lp_params()
    elif kind == ZERO_3:
        for weight, master in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True):
            if weight is not None and weight.data_ptr() != master.data_ptr():
                weight.data.copy_(master.data)
    elif kind == FP16_FUSED:
        for weight, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            weight.data.copy_(master.data)
    elif kind == FP16_UNFUSED:
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def refresh_masters(engine: Any) -> None:
    """After the computing weights have changed: make the masters their cast."""
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


def after_restore(engine: Any) -> None:
    """Renew DeepSpeed's links from parameters to optimizer state, and re-gather what ZeRO-3 keeps whole."""
    optimizer = engine.optimizer
    if wrapper_of(engine) in (ZERO_1_2, BF16):
        optimizer._link_all_hp_params()
        optimizer._hp_optimizer_states_linked = False
        if all(partition.master in optimizer.optimizer.state for partition in partitions(engine)):
            optimizer._lazy_init_hp_params_optimizer_state()
    if wrapper_of(engine) == ZERO_3 and getattr(optimizer, "save_muon_momentum_buffer_in_memory", False):
        _link_momenta(optimizer)
    epilogue = getattr(optimizer, "checkpoint_event_epilogue", None)
    if epilogue is not None:
        epilogue()


def _link_momenta(optimizer: Any) -> None:
    """Muon under ZeRO-3 steps on buffers of its own here, and puts them into the state afterwards."""
    for s, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        momentum = optimizer.optimizer.state.get(master, {}).get(MOMENTUM)
        if momentum is not None:
            momentum.swappable, momentum.ds_id = False, master.ds_id
            optimizer.muon_momentum_buffer_partitioned_groups_flat[s] = momentum
