"""Changes the state of DeepSpeed's optimizers during a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_unickpt.framework import persistent_parameters, swap_files
from ds_unickpt.framework.internals import BF16, FP16_FUSED, FP16_UNFUSED, ZERO_1_2, ZERO_3, base_optimizer, is_muon, wrapper_of
from ds_unickpt.framework.partitions import MOMENTUM, OFFLOADED, Partition
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.load import shared_gather


def empty_state(engine: Any, partition: Partition, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros for an elementwise state. ``add_state`` adds it.

    ``dtype`` is that of the state, except where DeepSpeed's own differs.
    """
    base = base_optimizer(engine)
    if key == MOMENTUM and is_muon(base) and key not in partition.whole:
        # follows ``_create_momentum_buffer`` of runtime/zero/stage3.py; other wrappers use the dtype of the masters
        zero_3 = wrapper_of(engine) == ZERO_3
        dtype = engine.optimizer.communication_data_type if zero_3 else partition.master.dtype
    shape = partition.shape(key)
    if shape == tuple(partition.master.shape):
        return torch.zeros_like(partition.master, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=partition.master.device)


def add_state(engine: Any, partition: Partition, key: str, tensor: torch.Tensor) -> None:
    """Add an elementwise state that the optimizer lacks."""
    state = _states(engine, partition)
    state[partition.master][key] = tensor
    if wrapper_of(engine) == ZERO_3 and key in ("exp_avg", "exp_avg_sq") and "optim_states" in _offloaded(engine.optimizer):
        state[partition.master][key + OFFLOADED] = tensor  # ``reload_states`` expects it there


def keep_states(engine: Any, partition: Partition, keys: Collection[str]) -> None:
    """Remove the states with other keys. An optimizer without any creates them in its next step.

    States on NVMe stay: their files belong to a sub-group as a whole.
    """
    states, master = _states(engine, partition), partition.master
    held = states.get(master, {})
    for key in [key for key in held if key not in keys and key.removesuffix(OFFLOADED) not in keys]:
        if partition.swapped is None or key not in partition.swapped.tensors:
            del held[key]
    if not held:
        states.pop(master, None)
    buffers = getattr(engine.optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
    if MOMENTUM not in keys:
        for momentum in (buffers[s] for s in buffers if getattr(buffers[s], "ds_id", None) == getattr(master, "ds_id", -1)):
            momentum.zero_()


def _states(engine: Any, partition: Partition) -> Any:
    """Return the states of the optimizer that steps on a partition, by master."""
    stepping: Any = partition.stepped_by or base_optimizer(engine)
    return stepping.state


def forget_gradients(engine: Any) -> None:
    """Drop gradients of other weights that an unfinished accumulation holds. The next micro-batch is the first of a step."""
    optimizer = engine.optimizer
    engine.zero_grad()
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    if wrapper_of(engine) == ZERO_1_2:
        optimizer.micro_step_id = -1  # ``INITIAL_MICRO_STEP_ID`` of runtime/zero/stage_1_and_2.py
        for gradients in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
            gradients.update(dict.fromkeys(gradients))
    for name, value in (("_epilogue_ran_this_backward", False), ("_offload_accumulated_param_ids", set())):
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    engine.micro_steps = engine._unmanaged_backward_count = 0


def _offloaded(optimizer: Any) -> set[str]:
    return {state.value for state in getattr(optimizer, "offloaded_states", ())}


def reload_states(engine: Any) -> Callable[[], None]:
    """Reload the states that ``engine.offload_states`` moved. Returns a function that offloads the same states again."""
    optimizer = engine.optimizer
    away = list(getattr(optimizer, "offloaded_states", ()))
    if not away:
        return lambda: None
    buffers = ("hp_params_pin_buffers", "lp_params_pin_buffers", "lp_param_contiguous_pin_buffer")
    pinned = any(hasattr(optimizer, name) for name in (*buffers, "lp_grad_partitions_flat_pin_buffers"))
    engine.reload_states()
    return lambda: engine.offload_states(include=away, pin_memory=pinned)


def refresh_weights(
    engine: Any, parts: Sequence[Partition], host_peers: HostPeers | None = None, *, derived: bool = False
) -> None:
    """Set the weights to the cast of their masters.

    Args:
        parts: what the optimizer holds.
        host_peers: all ranks of this host, which make the same call. If the data-parallel groups of all of them lie within
            the host and the weights are in its memory, no collective runs. Otherwise ZeRO-1 and 2 run DeepSpeed's.
        derived: all weights of this rank have this value, also those of which other ranks have the masters.
    """
    kind, optimizer = wrapper_of(engine), engine.optimizer
    if host_peers is not None and shared_gather.gather(host_peers, _split_weights(engine), filled=derived):
        return
    if derived and (kind == ZERO_3 or dist.get_world_size() == 1):
        return
    if kind in (ZERO_1_2, BF16):
        optimizer.update_lp_params()
    elif kind == ZERO_3:
        for part in parts:
            if part.weight is not None:
                part.weight.data.copy_(part.elements)
            for piece in part.pieces if part.weights else ():
                weight = part.weight_of(piece)
                if weight is not None:
                    weight.copy_(part.elements.narrow(0, piece.at, piece.hi - piece.lo))
    elif kind == FP16_FUSED:
        for weight, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            weight.data.copy_(master.data)
    elif kind == FP16_UNFUSED:
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def gathers_within(engine: Any, host_peers: HostPeers) -> bool:
    """Whether ``refresh_weights`` can gather the weights of this rank through the memory of its host."""
    tensors = _split_weights(engine)
    return tensors is not None and all(tensor.is_within(host_peers) for tensor in tensors)


def _split_weights(engine: Any) -> list[shared_gather.SplitTensor] | None:
    """Return the weights that ``update_lp_params`` gathers; None if another way derives the weights."""
    kind, optimizer = wrapper_of(engine), engine.optimizer
    if kind == ZERO_1_2:
        weights, masters = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
    elif kind == BF16:
        weights, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    else:
        return None
    found = []
    for group, parts, master in zip(optimizer.real_dp_process_group, weights, masters, strict=False):
        ranks = tuple(dist.get_process_group_ranks(group))
        rank = dist.get_group_rank(group, dist.get_rank())
        found.append(shared_gather.SplitTensor(ranks, rank, [p.detach() for p in parts], master.detach()))
    return found if len(found) == len(weights) else None


def refresh_masters(engine: Any) -> None:
    """Set the masters to the cast of their weights."""
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


def after_restore(engine: Any, parts: Sequence[Partition]) -> None:
    """Renew DeepSpeed's links from parameters to optimizer states. ZeRO-3 gathers its persistent parameters (a collective)."""
    optimizer = engine.optimizer
    if wrapper_of(engine) in (ZERO_1_2, BF16):
        optimizer._link_all_hp_params()
        optimizer._hp_optimizer_states_linked = False
        if all(partition.master in optimizer.optimizer.state for partition in parts):
            optimizer._lazy_init_hp_params_optimizer_state()
    if wrapper_of(engine) == ZERO_3 and getattr(optimizer, "save_muon_momentum_buffer_in_memory", False):
        _link_momenta(optimizer)
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:  # the epilogue forgets those of frozen parameters
            parameter.ds_secondary_tensor = None
    swap_files.flush(_swap_paths(engine, parts))
    if gathers_after(engine):
        persistent_parameters.gather(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()


def gathers_after(engine: Any) -> bool:
    """Whether ``after_restore`` calls a collective. ZeRO-3 gathers its persistent parameters."""
    return getattr(engine.optimizer, "checkpoint_event_epilogue", None) is not None


def _swap_paths(engine: Any, parts: Sequence[Partition]) -> set[str]:
    found = swap_files.release_weights(engine.module)
    return found.union(*(part.swapped.paths.values() for part in parts if part.swapped is not None))


def _link_momenta(optimizer: Any) -> None:
    """Link the momentum buffers that Muon under ZeRO-3 keeps outside the optimizer state."""
    for s, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        momentum = optimizer.optimizer.state.get(master, {}).get(MOMENTUM)
        if momentum is not None:
            momentum.swappable, momentum.ds_id = False, master.ds_id
            optimizer.muon_momentum_buffer_partitioned_groups_flat[s] = momentum
