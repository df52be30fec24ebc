"""Access to private attributes of Megatron's optimizers: what they hold on this rank, by model parameter.

Follows megatron-core 0.12 to 0.19 and the development branch: ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py``,
``optimizer/layer_wise_optimizer.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from megatron_unickpt.framework import cpu_offload, remainders
from unickpt.transform.convert.megatron import keys

# Keys of a torch parameter group that select an implementation. They belong to the running job.
SWITCHES = frozenset(
    {
        "params", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay",
        *keys.GROUP_IDENTITY, *cpu_offload.PLACEMENT,
    }
)  # fmt: skip
MASTER = "master"  # of ``Resting``
_MASTER = "master_param"  # of the states of FusedAdam
_TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(slots=True, eq=False)
class HeldRange:
    """A flat range of a local model parameter, and the state of this rank's optimizer for it.

    Attributes:
        parameter: parameter of the model, a tensor parallel shard or whole.
        lo, hi: range of the flattened ``parameter``, half-open.
        main: tensor that the optimizer steps on, of ``hi - lo`` elements.
        states: elementwise optimizer states, each of ``hi - lo`` elements.
        scalars: per-parameter states that are one number, or None.
        others: states of another shape than the parameter, such as the factors of SOAP and the row norms of NorMuon.
        group: parameter group of the inner optimizer.
        instance: None if every data parallel rank holds the same range. Otherwise the ranks hold different ranges, and this
            is the index of the distributed optimizer instance.
    """

    parameter: torch.nn.Parameter
    lo: int
    hi: int
    main: torch.Tensor
    states: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    others: dict[str, torch.Tensor]
    group: dict[str, Any]
    instance: int | None = None


@dataclass(slots=True)
class Leaf:
    """One optimizer that steps. A chained optimizer has several.

    Attributes:
        optimizer: Megatron's wrapper.
        inner: torch or fused optimizer inside the wrapper.
        held: ranges that the optimizer holds on this rank.
        elsewhere: parameters of this rank's model whose state other data parallel ranks hold.
        instance: see ``HeldRange``; applies to ``elsewhere``.
        copies: with CPU offload, what the optimizer steps on, by the id of the parameter in its groups.
    """

    optimizer: Any
    inner: Any
    held: list[HeldRange] = field(default_factory=list)
    elsewhere: list[torch.nn.Parameter] = field(default_factory=list)
    instance: int | None = None
    copies: dict[int, cpu_offload.OffloadedCopy] = field(default_factory=dict)


def unsupported_reason(optimizer: Any) -> str:
    """Return the reason why unickpt cannot store this optimizer's state by parameter, or ''."""
    for leaf, _ in _wrappers(optimizer):
        ddp = getattr(leaf, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False):
            return "Megatron FSDP"
        if not isinstance(leaf, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
            return f"the optimizer wrapper {type(leaf).__name__}"
    return ""


def _wrappers(optimizer: Any, layer_wise: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield the wrappers that step, and the active layer-wise optimizer that each belongs to, or None.

    Since 0.18 a layer-wise optimizer can itself be in a chain, with a distributed optimizer for the other parameters.
    """
    if isinstance(optimizer, ChainedOptimizer):
        mine = optimizer if _layerwise_lists(optimizer) is not None else layer_wise
        for inner in optimizer.chained_optimizers:
            yield from _wrappers(inner, mine)
    elif optimizer is not None:
        yield optimizer, layer_wise


def leaves(optimizer: Any, *, allocate: bool, masters_of: Collection[int] | None = None) -> list[Leaf]:
    """Return what an optimizer holds on this rank, by model parameter.

    Args:
        optimizer: any of Megatron's wrappers, chained or not.
        allocate: create the states that a new optimizer lacks, as Megatron does before it loads.
        masters_of: ids of parameters, whose masters alone are returned. A precision-aware optimizer has copies of its states
            made for every other request.
    """
    found: list[Leaf] = []
    layered: dict[int, tuple[Any, list[Leaf]]] = {}
    for wrapper, layer_wise in _wrappers(optimizer):
        members = layered.setdefault(id(layer_wise), (layer_wise, []))[1] if layer_wise is not None else []
        inner = wrapper.optimizer
        if inner is None or getattr(wrapper, "is_stub_optimizer", False):
            continue
        if allocate:
            _allocate(wrapper)
        leaf = Leaf(wrapper, inner, copies=cpu_offload.copies(inner))
        if isinstance(wrapper, DistributedOptimizer):
            _fill_distributed(leaf, masters_of)
        else:
            _fill_plain(leaf, masters_of, sharded=layer_wise is not None)
        found.append(leaf)
        members.append(leaf)
    for layer_wise, members in layered.values():
        if members:
            held = {id(h.parameter) for leaf in members for h in leaf.held}
            members[0].elsewhere = [p for p in _layerwise_lists(layer_wise) or () if id(p) not in held]
            members[0].instance = 0
    return found


def _allocate(wrapper: Any) -> None:
    """Create states with Megatron's function. Without one (SGD, custom wrappers), create the initial states of torch."""
    if wrapper.init_state_fn is not None:
        wrapper.init_state_fn(wrapper.optimizer, wrapper.config)
    else:
        for optimizer in cpu_offload.inner_optimizers(wrapper.optimizer):
            _allocate_as_torch(optimizer)
    for optimizer in cpu_offload.inner_optimizers(wrapper.optimizer):
        _begin_counting(optimizer)
    cpu_offload.publish_states(wrapper.optimizer)


def _allocate_as_torch(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        names = _initial_states(optimizer, group)
        for stepped in group["params"]:
            state = optimizer.state[stepped]
            if names and not state:
                state.update({name: torch.zeros_like(stepped.data) for name in names})


def _begin_counting(optimizer: Any) -> None:
    """Add the counts of steps, which Megatron's function does not create. Without one the next step of torch's Adam fails."""
    if isinstance(optimizer, _TORCH_ADAM):
        for group in optimizer.param_groups:
            for stepped in group["params"]:
                if stepped in optimizer.state:
                    optimizer.state[stepped].setdefault("step", _new_step(group, stepped, 0.0))


def _new_step(group: dict[str, Any], stepped: torch.Tensor, step: float) -> torch.Tensor:
    """Return the count of steps of a parameter, where torch's optimizers keep it: in host memory, or with the parameter."""
    device = stepped.device if group.get("fused") or group.get("capturable") else "cpu"
    return torch.tensor(step, dtype=torch.float32, device=device)


def new_scaler_state(wrapper: Any) -> dict[str, Any]:
    """Return the state of the loss scaler of a wrapper as in a new job; empty for a constant scale."""
    scaler = wrapper.grad_scaler
    if not hasattr(scaler, "hysteresis"):
        return {}
    scale = torch.tensor([wrapper.config.initial_loss_scale], dtype=torch.float)
    return {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": scaler.hysteresis}


def stepped(leaves: Sequence[Leaf]) -> bool | None:
    """Whether these optimizers have stepped. None if no parameter is here, or if no state can tell.

    One that counts no steps has stepped if it has state.
    """
    held = [each for leaf in leaves for each in leaf.held]
    counted = [each.scalars["step"] for each in held if each.scalars.get("step") is not None]
    counted += [group["step"] for leaf in leaves for group in leaf.inner.param_groups if "step" in group]
    if counted:
        return any(float(step) > 0 for step in counted)
    if any(each.states or each.others for each in held):
        return True
    keeps = any(leaf.optimizer.init_state_fn is not None or _torch_states(leaf.inner) for leaf in leaves)
    return False if held and keeps else None


def _torch_states(optimizer: Any) -> bool:
    return any(
        _initial_states(inner, group) for inner in cpu_offload.inner_optimizers(optimizer) for group in inner.param_groups
    )


def _initial_states(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the states that an optimizer keeps for the parameters of a group. Empty if unknown."""
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        return ("momentum_buffer",)
    if isinstance(optimizer, _TORCH_ADAM) or _is_fused_adam(optimizer):
        return ("exp_avg", "exp_avg_sq")
    return ()


def _is_fused_adam(optimizer: Any) -> bool:
    """Whether this is FusedAdam of TransformerEngine or Apex."""
    return any(kind.__name__ == "FusedAdam" for kind in type(optimizer).__mro__)


def _layerwise_lists(optimizer: Any) -> list[torch.nn.Parameter] | None:
    """Return all parameters of an active LayerWiseDistributedOptimizer, or None. One rank holds each parameter."""
    if type(optimizer).__name__ != "LayerWiseDistributedOptimizer":
        return None
    lists = [*(getattr(optimizer, "dp_cp_params_list", None) or []), *(getattr(optimizer, "expt_dp_params_list", None) or [])]
    return [p for some in lists for p in some] if lists else None


@dataclass(frozen=True, slots=True)
class Resting:
    """What an optimizer holds of a model parameter on this rank, as it lies in memory.

    Attributes:
        parameter: parameter of the model.
        stepped: tensor in the groups of the inner optimizer that stands for it.
        whole: every data parallel rank holds the same.
        tensors: states by their key, and the master, if the model does not compute with it.
    """

    parameter: torch.nn.Parameter
    stepped: torch.Tensor
    whole: bool
    tensors: list[tuple[str, torch.Tensor]]


def resting(optimizer: Any) -> Iterator[Resting]:
    """Yield what an optimizer holds on this rank between two steps, without copies of anything."""
    for wrapper, layer_wise in _wrappers(optimizer):
        inner = wrapper.optimizer
        if inner is None or getattr(wrapper, "is_stub_optimizer", False):
            continue
        copies = cpu_offload.copies(inner)
        whole = layer_wise is None and not isinstance(wrapper, DistributedOptimizer)
        for parameter, stepped in _stepped_on(wrapper):
            copy = copies.get(id(stepped))
            state = inner.state.get(stepped, {}) if copy is None else copy.state
            main = stepped if copy is None else copy.stepped
            tensors = [(MASTER if key == _MASTER else key, value) for key, value in _one_by_one(state)]
            if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                tensors.append((MASTER, main))
            held = [(key, value) for key, value in tensors if isinstance(value, torch.Tensor)]
            yield Resting(parameter, stepped, whole, held)


def steppers(optimizer: Any) -> list[Any]:
    """Return the inner optimizers that step on this rank."""
    some = (wrapper for wrapper, _ in _wrappers(optimizer) if not getattr(wrapper, "is_stub_optimizer", False))
    return [wrapper.optimizer for wrapper in some if wrapper.optimizer is not None]


def _stepped_on(wrapper: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield model parameters, and the tensors in the groups of the inner optimizer that stand for them."""
    if isinstance(wrapper, DistributedOptimizer):
        for models, shards in _shards(wrapper):
            for parameters, held in zip(models, shards, strict=True):
                yield from zip(parameters, held, strict=True)
        return
    model_of = _model_of(wrapper)
    for group in wrapper.optimizer.param_groups:
        yield from ((model_of.get(id(stepped), stepped), stepped) for stepped in group["params"])


def weights_follow_late(optimizer: Any) -> bool:
    """Whether weights may be gathered after ``step`` has returned: in the next forward pass, or by a layer-wise optimizer."""
    configs = [getattr(wrapper, name, None) for wrapper, _ in _wrappers(optimizer) for name in ("ddp_config", "config")]
    overlapped = any(getattr(config, "overlap_param_gather", False) for config in configs)
    return overlapped or any(layer_wise is not None for _, layer_wise in _wrappers(optimizer))


def _shards(optimizer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the groups of model parameters of a ``DistributedOptimizer``, and what it steps on: of 16 bits, and of fp32."""
    mains = optimizer.shard_float16_groups if _precision_aware(optimizer) else optimizer.shard_fp32_from_float16_groups
    return (optimizer.model_float16_groups, mains), (optimizer.model_fp32_groups, optimizer.shard_fp32_groups)


def _model_of(optimizer: Any) -> dict[int, torch.nn.Parameter]:
    """Return the model parameter of each master by its id, of a wrapper that is not distributed."""
    found: dict[int, torch.nn.Parameter] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            found |= {id(main): model for model, main in zip(models, mains, strict=True)}
    return found


def _fill_distributed(leaf: Leaf, masters_of: Collection[int] | None) -> None:
    """Yield the parameter ranges of a ``DistributedOptimizer``: this rank's range of every bucket (``gbuf_ranges``)."""
    optimizer = leaf.optimizer
    leaf.instance = int(getattr(optimizer, "distributed_optimizer_instance_id", 0))
    ranges: dict[int, Any] = {}
    for per_dtype in optimizer.gbuf_ranges:
        for bucket in itertools.chain.from_iterable(per_dtype.values()):
            ranges |= {id(parameter): found["param"] for parameter, found in bucket["param_map"].items()}
    groups, scaled = optimizer.optimizer.param_groups, _precision_aware(optimizer)
    for models, shards in _shards(optimizer):
        for group, parameters, held in zip(groups, models, shards, strict=True):
            for parameter, shard in zip(parameters, held, strict=True):
                if masters_of is not None and id(parameter) not in masters_of:
                    continue
                part = ranges[id(parameter)]
                found = _states_of(leaf, shard, scaled=scaled, master_alone=masters_of is not None)
                leaf.held.append(HeldRange(parameter, part.start, part.end, *found, group, leaf.instance))
    here = {id(h.parameter) for h in leaf.held}
    for buffer in optimizer.buffers:
        leaf.elsewhere += [p for p in buffer.params if id(p) not in here]


def _fill_plain(leaf: Leaf, masters_of: Collection[int] | None, *, sharded: bool) -> None:
    """Yield the whole local parameters of ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer``."""
    model_of, scaled = _model_of(leaf.optimizer), _precision_aware(leaf.optimizer)
    for group in leaf.inner.param_groups:
        for stepped in group["params"]:
            parameter = model_of.get(id(stepped), stepped)
            if masters_of is not None and id(parameter) not in masters_of:
                continue
            instance = 0 if sharded else None
            found = _states_of(leaf, stepped, scaled=scaled, master_alone=masters_of is not None)
            leaf.held.append(HeldRange(parameter, 0, parameter.numel(), *found, group, instance))


def _precision_aware(optimizer: Any) -> bool:
    """Whether TransformerEngine's FusedAdam holds the masters (``--use-precision-aware-optimizer``)."""
    config = optimizer.config
    for name in ("use_precision_aware_optimizer_no_fp8_or_ds_fp8", "use_precision_aware_optimizer"):
        if hasattr(config, name):
            return bool(getattr(config, name))
    return False


def _states_of(
    leaf: Leaf, stepped: torch.Tensor, *, scaled: bool, master_alone: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
    """Return main, states, scalars and others of a parameter (see ``HeldRange``).

    Args:
        leaf: the optimizer.
        stepped: tensor in its groups.
        scaled: the optimizer is precision-aware.
        master_alone: return the main only.
    """
    copy = leaf.copies.get(id(stepped))
    state = leaf.inner.state.get(stepped, {}) if copy is None else copy.state
    main = stepped if copy is None else copy.stepped
    shape = stepped.shape
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in _one_by_one(state):
        if master_alone and key != _MASTER:
            continue
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float, bool)) or (value is None and key in state):
                scalars[key] = value
        elif key != "step" and value.shape == shape:
            # of SOAP: boxes of a state are views of it
            if not value.is_contiguous() and value.stride() != stepped.stride() and key in state:
                value = state[key] = value.contiguous()
            tensors[key] = leaf.inner.get_unscaled_state(stepped, key) if scaled and copy is None else value
        elif value.dim() == 0 or key == "step":
            scalars[key] = value
        elif value.numel():
            others[key] = value
    if _MASTER in tensors:
        main = tensors.pop(_MASTER)
    if main.dtype == torch.int16:
        main = remainders.joined(stepped, main)
    return main, tensors, scalars, others


def _one_by_one(state: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the values of a parameter's state. Those of a list have its name and their number, such as ``GG_0``."""
    for value in state.values():
        if isinstance(value, (list, tuple)):
            return _listed(state)
    return state.items()


def _listed(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{key}_{at}", each) for at, each in enumerate(value))
        else:
            yield key, value


def write_back(leaf: Leaf, held: HeldRange) -> None:
    """Write the filled tensors of ``held`` into a precision-aware optimizer, which returns copies of its tensors.

    With CPU offload the tensors are the optimizer's own, and a master that it has on the device too is written there.
    """
    if leaf.copies:
        for outer in held.group["params"]:
            if leaf.copies[id(outer)].stepped is held.main:
                cpu_offload.copy_back(outer, leaf.copies[id(outer)])
        return
    if not _precision_aware(leaf.optimizer) or not isinstance(leaf.optimizer, DistributedOptimizer):
        return
    for stepped in held.group["params"]:
        if stepped.data_ptr() == held.parameter.view(-1)[held.lo :].data_ptr():
            kept = leaf.inner.state.get(stepped, {})
            values = {_MASTER: held.main, **held.states}
            if _MASTER in kept and kept[_MASTER].dtype == torch.int16:
                weights, values[_MASTER] = remainders.divided(held.main)
                stepped.data.copy_(weights)
            for key, value in values.items():
                if key in kept:
                    leaf.inner.set_scaled_state(stepped, key, value)


def has_master(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer holds a master of this parameter. One of CPU offload alone is not known here."""
    return getattr(parameter, "main_param", None) is not None


def steps_per_parameter(leaf: Leaf) -> bool:
    """Whether ``set_step`` sets the step of each parameter. Otherwise the optimizer has it in its groups."""
    kept = any("step" in state for state in leaf.inner.state.values())  # SOAP, for one
    return bool(leaf.copies) or kept or cpu_offload.steps_per_parameter(leaf.inner)


def name_of(leaf: Leaf) -> str:
    """Return the name of the optimizer that steps, for the manifest."""
    return type(cpu_offload.inner_optimizers(leaf.inner)[0]).__name__


def set_none(leaf: Leaf, held: HeldRange, keys: Collection[str]) -> None:
    """Set states of a parameter to None."""
    for stepped in held.group["params"] if keys else ():
        copy = leaf.copies.get(id(stepped))
        if copy is None and (stepped is held.main or stepped is held.parameter):
            leaf.inner.state[stepped].update(dict.fromkeys(keys))
        elif copy is not None and copy.stepped is held.main:
            copy.optimizer.state[copy.stepped].update(dict.fromkeys(keys))


def set_step(leaf: Leaf, held: HeldRange, step: float) -> None:
    """Set the step count of a parameter."""
    for stepped in held.group["params"]:
        copy = leaf.copies.get(id(stepped))
        if copy is not None:
            if copy.stepped is held.main:
                copy.set_step(step)
            continue
        state = leaf.inner.state.get(stepped)
        if state and cpu_offload.counts_steps(leaf.inner, state) and (stepped is held.main or stepped is held.parameter):
            number = type(state.get("step")) is int
            state["step"] = int(step) if number else _new_step(held.group, stepped, float(step))
