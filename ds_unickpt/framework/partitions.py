"""Describes what DeepSpeed's optimizers hold on one rank. Calls no collective. Uses private attributes of DeepSpeed.

A *partition* is a tensor that the optimizer steps on, with the parameter ranges in it. The layouts come from DeepSpeed's
sources (the docstrings name the files) and are verified against live weights. ``framework/versions.py`` has the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from torch.distributed import get_process_group_ranks

from ds_unickpt.framework import internals, tensor_parallel
from ds_unickpt.framework.fallbacks import UNKNOWN_BUFFERS
from ds_unickpt.framework.internals import BF16, FP16_FUSED, FP16_UNFUSED, ZERO_1_2, ZERO_3, ExpertLayer, is_zero3, wrapper_of
from ds_unickpt.framework.swap_files import SwappedPartition, swapped_weight
from ds_unickpt.placing.placement import Placement
from ds_unickpt.placing.slices import RankValues


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Flat range ``[lo, hi)`` of a parameter, at element ``at`` of a flat tensor."""

    parameter: torch.nn.Parameter
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One tensor that the optimizer steps on, on this rank.

    Attributes:
        master: key of the optimizer's state: a flat 1-D tensor, or without ZeRO a tensor of the parameter's shape.
        weight: tensor that the model computes with, elementwise parallel to ``master``; None if it is ``master``.
        pieces: parameter ranges in ``master`` that this rank holds. The rest of a flat tensor is padding.
        parameters: all parameters of the partitioned group, also those on other ranks.
        group: parameter group of the optimizer (a live dict).
        replicated: every rank holds the same values.
        stored: this rank stores its copy. With data and sequence parallelism DeepSpeed partitions over the data-parallel ranks
            alone. The data-parallel groups then hold copies of each other, and the group with the first rank
            (``Placement.slice_ranks``) stores.
        stepped_by: optimizer that steps on ``master``, if it is not the one of the engine: with partial offload under ZeRO-3,
            DeepSpeed steps on the sub-groups that stay on the device with a second optimizer.
        across: see ``Placement.across``.
        swapped: files that hold the elements of ``master`` and the states, if they are on NVMe. ``master`` has no values then.
        weights: this rank's part of each parameter by id, if the parameters of the partition are on NVMe. ``weight`` is then
            None.
        whole: states whose tensor holds whole parameters back to back, not elementwise parallel to ``master``. Maps the key
            to the parameter ranges in that tensor.
    """

    master: torch.Tensor
    weight: torch.Tensor | None
    pieces: tuple[ParameterRange, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    group: MutableMapping[str, Any]
    replicated: bool
    stored: bool = True
    across: bool = False
    stepped_by: torch.optim.Optimizer | None = None
    swapped: SwappedPartition | None = None
    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    whole: Mapping[str, tuple[ParameterRange, ...]] = field(default_factory=dict)

    @property
    def elements(self) -> torch.Tensor:
        """The values of ``master``, also if they are on NVMe."""
        return self.master if self.swapped is None else self.swapped.tensors["master"]

    def weight_of(self, piece: ParameterRange) -> torch.Tensor | None:
        """Return the weights of a piece, 1-D; None if the model computes with the masters."""
        if self.weight is not None:
            return self.weight.detach().reshape(-1).narrow(0, piece.at, piece.hi - piece.lo)
        part = self.weights.get(id(piece.parameter))
        return None if part is None else part.narrow(0, 0, piece.hi - piece.lo)

    def held(self, state: str) -> tuple[ParameterRange, ...]:
        """Return the parameter ranges of a state on this rank, at their positions in the state's tensor."""
        return self.whole.get(state, self.pieces)

    def own(self, state: str) -> tuple[ParameterRange, ...]:
        """Return the ranges of ``held`` that no other partition has."""
        if state not in self.whole:
            return self.pieces
        at = {id(piece.parameter): piece.at for piece in self.whole[state]}
        return tuple(ParameterRange(p.parameter, p.lo, p.hi, at[id(p.parameter)] + p.lo) for p in self.pieces)

    def shape(self, state: str) -> tuple[int, ...]:
        """Shape of a state's tensor, if the state is elementwise."""
        whole = self.whole.get(state)
        return tuple(self.elements.shape) if whole is None else (sum(piece.hi for piece in whole),)


T = TypeVar("T")


class KnownRanges:
    """Parameter ranges that were read before. They are the same objects as long as the parameters and sizes are the same.

    It holds the parameters, which the optimizer holds as well. So it lives and dies with the engine.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], Any]] = {}
        self._checked: dict[int, tuple[Any, ...]] = {}

    def of(self, group: int, parameters: Sequence[torch.nn.Parameter], sizes: tuple[Any, ...], made: Callable[[], T]) -> T:
        """Return ``made()`` of the parameters of a group. ``sizes``: what it depends on beside these."""
        read = (list(map(id, parameters)), sizes)
        if group not in self._known or self._known[group][0] != read:
            self._known[group] = (read, (made(), tuple(parameters)))  # an id may become that of another object
            self._checked = {}
        found: T = self._known[group][1][0]
        return found

    def check(self, partition: Partition) -> None:
        """Raises UnsupportedLayoutError if the ranges of a partition do not fit its tensors. They are checked once."""
        size, weight = partition.elements.numel(), partition.weight
        read = (size, None if weight is None else weight.numel())
        if partition.whole or self._checked.get(id(partition.pieces), ())[1:] != read:
            _check(partition)
            self._checked[id(partition.pieces)] = (partition.pieces, *read)


def partitions(engine: Any, placed: Placement, known: KnownRanges | None = None) -> list[Partition]:
    """Return what the optimizer holds on this rank. Calls no collective.

    Args:
        known: of earlier reads.

    Raises:
        UnsupportedLayoutError: the layout of the buffers is unknown.
    """
    kind = wrapper_of(engine)
    if kind == "none":
        return []
    known = KnownRanges() if known is None else known
    build: dict[str, Callable[[Any], Iterator[Partition]]] = {
        "plain": partial(_plain, known=known),
        ZERO_1_2: partial(_zero_1_2, placed=placed, known=known),
        ZERO_3: partial(_zero_3, placed=placed, known=known),
        BF16: partial(_bf16, placed=placed, known=known),
        FP16_FUSED: partial(_fp16_fused, known=known),
        FP16_UNFUSED: partial(_fp16_unfused, known=known),
    }
    found = list(build[kind](engine.optimizer))
    for partition in found:
        known.check(partition)
    return found


def _check(partition: Partition) -> None:
    size = partition.elements.numel()
    for state, whole in partition.whole.items():
        if {id(piece.parameter) for piece in partition.pieces} - {id(piece.parameter) for piece in whole}:
            raise UNKNOWN_BUFFERS.error(f"a partition holds a part of a parameter that its state {state} lacks")
    for piece in partition.pieces:
        if piece.at < 0 or piece.at + piece.hi - piece.lo > size:
            raise UNKNOWN_BUFFERS.error(
                f"a parameter range ends at element {piece.at + piece.hi - piece.lo} of a partition of {size} elements"
            )
    if partition.weight is not None and partition.weight.numel() != size:
        raise UNKNOWN_BUFFERS.error(f"a partition has {partition.weight.numel()} elements of weights and {size} of masters")


MOMENTUM = "momentum_buffer"
OFFLOADED = "_offload_buffer"


def states_of(optimizer: torch.optim.Optimizer, partition: Partition) -> dict[str, Any]:
    """Return the optimizer state of one partition, without the copies that DeepSpeed's offload adds, and without the states
    that differ between ranks (``ds_unickpt.compressing.optimizer_residuals``).
    """
    state = (partition.stepped_by or optimizer).state.get(partition.master, {})
    of_rank = internals.keys_of_rank(optimizer)
    if of_rank:
        state = {key: value for key, value in state.items() if key not in of_rank}
    if partition.swapped is not None:
        state = {key: partition.swapped.tensors.get(key, value) for key, value in state.items()}
    return {k: v for k, v in state.items() if not (k.endswith(OFFLOADED) and k.removesuffix(OFFLOADED) in state)}


Ranges = tuple[tuple[ParameterRange, ...], tuple[torch.nn.Parameter, ...]]


def _single(parameters: Sequence[torch.nn.Parameter], numels: Sequence[int]) -> list[Ranges]:
    """Return the range and the parameter of each partition, if each has one parameter as a whole."""
    return [((ParameterRange(p, 0, numel, 0),), (p,)) for p, numel in zip(parameters, numels, strict=True)]


def _packed(parameters: Sequence[torch.nn.Parameter], numels: Sequence[int]) -> Ranges:
    """Return the ranges of parameters that lie back to back."""
    pieces, at = [], 0
    for p, numel in zip(parameters, numels, strict=True):
        pieces.append(ParameterRange(p, 0, numel, at))
        at += numel
    return tuple(pieces), tuple(parameters)


def _numels(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.numel, tensors))


def _plain(optimizer: torch.optim.Optimizer, known: KnownRanges) -> Iterator[Partition]:
    """fp32 without ZeRO: no wrapper. The optimizer steps on the parameters."""
    for g, group in enumerate(optimizer.param_groups):
        params = group["params"]
        numels = _numels(params)
        ranges = known.of(g, params, (numels,), partial(_single, params, numels))
        for p, (pieces, parameters) in zip(params, ranges, strict=True):
            yield Partition(p, None, pieces, parameters, group, replicated=True)


def _fp16_unfused(optimizer: Any, known: KnownRanges) -> Iterator[Partition]:
    """runtime/fp16/unfused_optimizer.py: ``fp16_groups[g][i]`` is the weight of ``fp32_groups[g][i]``."""
    for g, group in enumerate(optimizer.optimizer.param_groups):
        params = optimizer.fp16_groups[g]
        numels = _numels(params)
        ranges = known.of(g, params, (numels,), partial(_single, params, numels))
        for p, master, (pieces, parameters) in zip(params, optimizer.fp32_groups[g], ranges, strict=True):
            yield Partition(master, p, pieces, parameters, group, replicated=True)


def _fp16_fused(optimizer: Any, known: KnownRanges) -> Iterator[Partition]:
    """runtime/fp16/fused_optimizer.py: the parameters of a group lie back to back in ``fp32_groups_flat[g]``."""
    for g, group in enumerate(optimizer.optimizer.param_groups):
        params = optimizer.fp16_groups[g]
        numels = _numels(params)
        pieces, parameters = known.of(g, params, (numels,), partial(_packed, params, numels))
        yield Partition(
            optimizer.fp32_groups_flat[g], optimizer.fp16_groups_flat[g], pieces, parameters, group, replicated=True
        )


def _zero_1_2(optimizer: Any, placed: Placement, known: KnownRanges) -> Iterator[Partition]:
    """runtime/zero/stage_1_and_2.py: this rank owns an equal part of the padded and reordered group."""
    offsets_of_group = getattr(optimizer, "round_robin_bit16_offsets", None)
    for g, params in enumerate(optimizer.round_robin_bit16_groups):
        numels = _numels(optimizer.round_robin_bit16_meta[g])
        process_group = optimizer.real_dp_process_group[g]
        rank = dist.get_rank(group=process_group)
        master = optimizer.single_partition_of_fp32_groups[g]
        offsets = list(offsets_of_group[g]) if offsets_of_group else None
        sizes = (numels, offsets, rank, master.numel())
        pieces, parameters = known.of(g, params, sizes, partial(_slice_of_group, params, *sizes))
        yield Partition(
            master,
            _bit16_partition(optimizer, g, rank),
            pieces,
            parameters,
            _group_of(optimizer.optimizer, master, g),
            replicated=False,
            stored=_stored(process_group, params, placed),
            whole=_whole_states(optimizer, g),
        )


def _bit16_partition(optimizer: Any, g: int, rank: int) -> torch.Tensor:
    """Return a weight partition. ``offload_states`` empties the list of partitions, but keeps their flat buffer."""
    partitions = optimizer.parallel_partitioned_bit16_groups[g]
    if not partitions:
        partitions = optimizer.get_data_parallel_partitions(optimizer.bit16_groups_flat[g], g)
    found: torch.Tensor = partitions[rank]
    return found


def _whole_states(optimizer: Any, g: int) -> dict[str, tuple[ParameterRange, ...]]:
    """Return the parameter ranges of Muon's momentum.

    Muon orthogonalizes whole matrices. A rank keeps the whole momentum of each parameter in its partition
    (``_muon_momentum_buffer`` of runtime/zero/stage_1_and_2.py). With offload, the momentum has the layout of the master.
    """
    params = optimizer.params_in_partition[g]
    muon = internals.is_muon(optimizer.optimizer)
    if not muon or optimizer.cpu_offload or not params or not getattr(params[0], "use_muon", False):
        return {}
    return {MOMENTUM: _packed(params, _numels(params))[0]}


def _bf16(optimizer: Any, placed: Placement, known: KnownRanges) -> Iterator[Partition]:
    """runtime/bf16_optimizer.py: like ZeRO-1, without reordering."""
    for g, params in enumerate(optimizer.bf16_groups):
        process_group = optimizer.real_dp_process_group[g]
        rank = dist.get_rank(group=process_group)
        master = optimizer.fp32_groups_flat_partition[g]
        sizes = (_numels(params), None, rank, master.numel())
        pieces, parameters = known.of(g, params, sizes, partial(_slice_of_group, params, *sizes))
        yield Partition(
            master,
            optimizer.bf16_partitioned_groups[g][rank],
            pieces,
            parameters,
            _group_of(optimizer.optimizer, master, g),
            replicated=False,
            stored=_stored(process_group, params, placed),
        )


def _stored(process_group: Any, params: Sequence[torch.nn.Parameter], placed: Placement) -> bool:
    """Whether the ranks of a group store their partitions. Groups of experts all do, because each has experts of its own."""
    return placed.stores(tuple(get_process_group_ranks(process_group))) or any(map(internals.is_expert, params))


def _slice_of_group(
    params: Sequence[torch.nn.Parameter], numels: Sequence[int], offsets: Sequence[int] | None, rank: int, size: int
) -> Ranges:
    begin, end = rank * size, (rank + 1) * size
    pieces, next_offset = [], 0
    for at, (p, numel) in enumerate(zip(params, numels, strict=True)):
        offset = next_offset if offsets is None else offsets[at]
        next_offset = offset + numel
        lo, hi = max(offset, begin), min(offset + numel, end)
        if lo < hi:
            pieces.append(ParameterRange(p, lo - offset, hi - offset, lo - begin))
    return tuple(pieces), tuple(params)


def _zero_3(optimizer: Any, placed: Placement, known: KnownRanges) -> Iterator[Partition]:
    """runtime/zero/stage3.py: each parameter is cut into equal parts. The parts of a sub-group lie back to back."""
    groups = getattr(optimizer, "sub_group_process_groups", None)
    weights = _zero_3_weights(optimizer)
    for s, params in enumerate(optimizer.fp16_groups):
        process_group = groups[s] if groups else getattr(params[0], "ds_process_group", optimizer.dp_process_group)
        rank, ranks = dist.get_rank(group=process_group), tuple(get_process_group_ranks(process_group))
        numels = [(p.partition_numel(), p.ds_numel) for p in params]
        pieces, parameters = known.of(s, params, (numels, rank), partial(_parts_of_group, params, numels, rank))
        at = sum(size for size, _ in numels)
        master = optimizer.fp32_partitioned_groups_flat[s]
        swapped = SwappedPartition.of(optimizer, s)
        size = (master if swapped is None else swapped.tensors["master"]).numel()
        if size != at:
            raise UNKNOWN_BUFFERS.error(f"ZeRO-3 sub-group {s} holds {size} elements, but its parameters have {at}")
        weight = weights[s]
        same = weight is None or (swapped is None and weight.data_ptr() == master.data_ptr())
        group = _group_of(optimizer.optimizer, master, optimizer.sub_group_to_group_id[s])
        yield Partition(
            master,
            None if same else weight,
            pieces,
            parameters,
            group,
            replicated=False,
            stored=_stored(process_group, params, placed),
            across=placed.across(ranks),
            stepped_by=_second_optimizer(optimizer, s),
            swapped=swapped,
            weights={id(p): part_of(p) for p in params} if weight is None else {},
        )


def _parts_of_group(params: Sequence[torch.nn.Parameter], numels: Sequence[tuple[int, int]], rank: int) -> Ranges:
    """Return the ranges of parameters that are each cut into equal parts. ``numels``: of a part and of the parameter."""
    pieces, at = [], 0
    for p, (size, numel) in zip(params, numels, strict=True):
        lo, hi = min(rank * size, numel), min(rank * size + size, numel)
        if lo < hi:
            pieces.append(ParameterRange(p, lo, hi, at))
        at += size
    return tuple(pieces), tuple(params)


def _second_optimizer(optimizer: Any, sub_group: int) -> torch.optim.Optimizer | None:
    """Return the optimizer of a sub-group that partial offload (``ratio``) leaves on the device (``_optimizer_step``)."""
    if not optimizer.offload_optimizer or getattr(optimizer, "partial_offload", 1.0) == 1.0:
        return None
    if optimizer.subgroup_to_device[sub_group] == "cpu":
        return None
    found: torch.optim.Optimizer = optimizer.backup_optimizer
    return found


def _zero_3_weights(optimizer: Any) -> list[torch.Tensor | None]:
    """Return the weights of the sub-groups. ``offload_states`` empties their list, but keeps their buffer."""
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
    """Return the group that holds ``master``, else the one at ``position``. DeepSpeed rebuilds Adagrad with one group."""
    for group in optimizer.param_groups:
        if any(p is master for p in group["params"]):
            return group
    return optimizer.param_groups[min(position, len(optimizer.param_groups) - 1)]


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """This rank's part of a parameter outside the optimizer.

    Attributes:
        lo, hi: flat range of the parameter.
        data: elements of the range, 1-D.
        live: ``data`` is a view of the parameter.
        replicated: all ranks hold the same values.
        stored, across: see ``Partition``.
    """

    lo: int
    hi: int
    data: torch.Tensor
    live: bool
    replicated: bool
    stored: bool = True
    across: bool = False


def held(parameter: Any, placed: Placement) -> HeldParameter | None:
    """Return this rank's part of a parameter: all of it, or its ZeRO-3 partition. None if it holds no element."""
    if not is_zero3(parameter):
        data = parameter.detach()
        return HeldParameter(0, data.numel(), data.reshape(-1), data.is_contiguous(), replicated=True)
    ranges = _zero3_range(parameter, dist.get_rank(group=parameter.ds_process_group))
    if not ranges:
        return None
    lo, hi = ranges[0]
    part = part_of(parameter)
    if part.numel() < hi - lo:
        raise UNKNOWN_BUFFERS.error(f"a ZeRO-3 partition has {part.numel()} elements, expected {hi - lo}")
    ranks = tuple(get_process_group_ranks(parameter.ds_process_group))
    return HeldParameter(lo, hi, part.narrow(0, 0, hi - lo), live=True, replicated=False,
                stored=_stored(parameter.ds_process_group, [parameter], placed), across=placed.across(ranks))  # fmt: skip


def part_of(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a ZeRO-3 parameter with padding, 1-D, also if it is on NVMe."""
    swapped = swapped_weight(parameter)
    part: torch.Tensor = parameter.ds_tensor.detach() if swapped is None else swapped
    return part


def placement(engine: Any, layers: Iterable[ExpertLayer], values: RankValues) -> Placement:
    """Return where this rank stands among the ranks of the job, by the expert layers and ``rank_values`` of an engine.

    ZeRO-3 partitions over the sequence-parallel peers as well, so they are no replicas there.
    """
    data = tuple(get_process_group_ranks(engine.seq_data_parallel_group))
    stage = internals.pipeline_stage(engine)
    rank, world = int(engine.global_rank), int(engine.world_size)
    ranks = tuple(range(world)) if stage is None else stage.ranks
    same = set(ranks).intersection(*(layer.ranks for layer in layers))
    same &= set(values.holders or same)
    tensors = tensor_parallel.degree(engine)
    copies = len(data) < len(ranks) // tensors and not engine.zero_optimization_partition_weights()
    number, stages = (0, 1) if stage is None else (stage.number, stage.count)
    return Placement(
        rank, world, number, stages, tuple(sorted(same)), ranks, data, data.index(rank) if copies else None,
        tensor_parallel.rank(engine), tensors,
    )  # fmt: skip
