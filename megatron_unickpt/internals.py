"""Access to private attributes of Megatron. No other module uses them, so a new version can break only this one.

Follows megatron-core 0.12 to 0.16 and the development branch: ``optimizer/optimizer.py``,
``optimizer/distrib_optimizer.py``, ``optimizer/layer_wise_optimizer.py``, ``parallel_state.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import validation
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from unickpt.convert.megatron import keys
from unickpt.dialects.model_facts import Model
from unickpt.options import Options, from_flags

# Keys of a torch parameter group that select an implementation. They belong to the running job.
SWITCHES = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay", *keys.GROUP_IDENTITY}
)


@dataclass(frozen=True, slots=True)
class Held:
    """A flat range of a local model parameter, and the state of this rank's optimizer for it.

    Attributes:
        parameter: parameter of the model, a tensor parallel shard or whole.
        lo, hi: range of the flattened ``parameter``, half-open.
        main: tensor that the optimizer steps on, of ``hi - lo`` elements.
        states: elementwise optimizer states, each of ``hi - lo`` elements.
        scalars: per-parameter states that are one number.
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
        instance: see ``Held``; applies to ``elsewhere``.
    """

    optimizer: Any
    inner: Any
    held: list[Held] = field(default_factory=list)
    elsewhere: list[torch.nn.Parameter] = field(default_factory=list)
    instance: int | None = None


def unsupported_reason(optimizer: Any) -> str:
    """Return the reason why unickpt cannot store this optimizer's state by parameter, or ''."""
    for leaf in _wrappers(optimizer):
        ddp = getattr(leaf, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False):
            return "Megatron FSDP"
        if type(getattr(leaf, "optimizer", None)).__name__ == "HybridDeviceOptimizer":
            return "the CPU offloading optimizer (HybridDeviceOptimizer)"
        if _keeps_remainders(leaf):
            return "store_param_remainders (masters kept as 16-bit remainders)"
        if not isinstance(leaf, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
            return f"the optimizer wrapper {type(leaf).__name__}"
    return ""


def _keeps_remainders(wrapper: Any) -> bool:
    config = wrapper.config
    return bool(
        _precision_aware(wrapper) and getattr(config, "store_param_remainders", False) and getattr(config, "bf16", False)
    )


def _wrappers(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, ChainedOptimizer):
        for inner in optimizer.chained_optimizers:
            yield from _wrappers(inner)
    elif optimizer is not None:
        yield optimizer


def leaves(optimizer: Any, *, allocate: bool) -> list[Leaf]:
    """Return what an optimizer holds on this rank, by model parameter.

    Args:
        optimizer: any of Megatron's wrappers, chained or not.
        allocate: create the states that a new optimizer lacks, as Megatron does before it loads.
    """
    found = []
    layerwise = _layerwise_lists(optimizer)
    for wrapper in _wrappers(optimizer):
        inner = wrapper.optimizer
        if inner is None or getattr(wrapper, "is_stub_optimizer", False):
            continue
        if allocate:
            _allocate(wrapper)
        leaf = Leaf(wrapper, inner)
        if isinstance(wrapper, DistributedOptimizer):
            _fill_distributed(leaf)
        else:
            _fill_plain(leaf, sharded=layerwise is not None)
        found.append(leaf)
    if layerwise is not None and found:
        held = {id(h.parameter) for leaf in found for h in leaf.held}
        found[0].elsewhere = [p for p in layerwise if id(p) not in held]
        found[0].instance = 0
    return found


def _allocate(wrapper: Any) -> None:
    """Create states with Megatron's function. Without one (SGD, custom wrappers), create the initial states of torch."""
    if wrapper.init_state_fn is not None:
        wrapper.init_state_fn(wrapper.optimizer, wrapper.config)
        return
    for group in wrapper.optimizer.param_groups:
        names: tuple[str, ...] = ()
        if isinstance(wrapper.optimizer, torch.optim.SGD) and group["momentum"]:
            names = ("momentum_buffer",)
        elif isinstance(wrapper.optimizer, (torch.optim.Adam, torch.optim.AdamW)) or _is_fused_adam(wrapper.optimizer):
            names = ("exp_avg", "exp_avg_sq")
        for stepped in group["params"]:
            state = wrapper.optimizer.state[stepped]
            if names and not state:
                state.update({name: torch.zeros_like(stepped.data) for name in names})


def _is_fused_adam(optimizer: Any) -> bool:
    """Whether this is FusedAdam of TransformerEngine or Apex."""
    return any(kind.__name__ == "FusedAdam" for kind in type(optimizer).__mro__)


def _layerwise_lists(optimizer: Any) -> list[torch.nn.Parameter] | None:
    """Return all parameters of an active LayerWiseDistributedOptimizer, or None. One rank holds each parameter."""
    if type(optimizer).__name__ != "LayerWiseDistributedOptimizer":
        return None
    lists = [*(getattr(optimizer, "dp_cp_params_list", None) or []), *(getattr(optimizer, "expt_dp_params_list", None) or [])]
    return [p for some in lists for p in some] if lists else None


def _fill_distributed(leaf: Leaf) -> None:
    """Yield the parameter ranges of a ``DistributedOptimizer``: this rank's range of every bucket (``gbuf_ranges``)."""
    optimizer = leaf.optimizer
    leaf.instance = int(getattr(optimizer, "distributed_optimizer_instance_id", 0))
    ranges: dict[int, Any] = {}
    for per_dtype in optimizer.gbuf_ranges:
        for bucket in itertools.chain.from_iterable(per_dtype.values()):
            ranges |= {id(parameter): found["param"] for parameter, found in bucket["param_map"].items()}
    groups = optimizer.optimizer.param_groups
    mains = optimizer.shard_float16_groups if _precision_aware(optimizer) else optimizer.shard_fp32_from_float16_groups
    for models, shards in ((optimizer.model_float16_groups, mains), (optimizer.model_fp32_groups, optimizer.shard_fp32_groups)):
        for group, parameters, held in zip(groups, models, shards, strict=True):
            for parameter, shard in zip(parameters, held, strict=True):
                part = ranges[id(parameter)]
                main, states, scalars = _states_of(leaf, shard)
                leaf.held.append(Held(parameter, part.start, part.end, main, states, scalars, group, leaf.instance))
    here = {id(h.parameter) for h in leaf.held}
    for buffer in optimizer.buffers:
        leaf.elsewhere += [p for p in buffer.params if id(p) not in here]


def _fill_plain(leaf: Leaf, *, sharded: bool) -> None:
    """Yield the whole local parameters of ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer``."""
    optimizer = leaf.optimizer
    model_of: dict[int, torch.nn.Parameter] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            model_of |= {id(main): model for model, main in zip(models, mains, strict=True)}
    for group in leaf.inner.param_groups:
        for stepped in group["params"]:
            parameter = model_of.get(id(stepped), stepped)
            main, states, scalars = _states_of(leaf, stepped)
            leaf.held.append(Held(parameter, 0, parameter.numel(), main, states, scalars, group, 0 if sharded else None))


def _precision_aware(optimizer: Any) -> bool:
    """Whether TransformerEngine's FusedAdam holds the masters (``--use-precision-aware-optimizer``)."""
    config = optimizer.config
    for name in ("use_precision_aware_optimizer_no_fp8_or_ds_fp8", "use_precision_aware_optimizer"):
        if hasattr(config, name):
            return bool(getattr(config, name))
    return False


def _states_of(leaf: Leaf, stepped: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    state = leaf.inner.state.get(stepped, {})
    main = stepped
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float, bool)):
                scalars[key] = value
        elif value.numel() == stepped.numel() and value.dim() == stepped.dim() and key != "step":
            tensors[key] = leaf.inner.get_unscaled_state(stepped, key) if _precision_aware(leaf.optimizer) else value
        elif value.numel() == 1:
            scalars[key] = value
    if "master_param" in tensors:
        main = tensors.pop("master_param")
    return main, tensors, scalars


def write_back(leaf: Leaf, held: Held) -> None:
    """Write the filled tensors of ``held`` into a precision-aware optimizer, which returns copies of its tensors."""
    if not _precision_aware(leaf.optimizer) or not isinstance(leaf.optimizer, DistributedOptimizer):
        return
    for stepped in held.group["params"]:
        if stepped.data_ptr() == held.parameter.view(-1)[held.lo :].data_ptr():
            for key, value in {"master_param": held.main, **held.states}.items():
                if key in leaf.inner.state.get(stepped, {}):
                    leaf.inner.set_scaled_state(stepped, key, value)


def steps_per_parameter(leaf: Leaf) -> bool:
    """Whether the inner optimizer keeps ``step`` per parameter, as torch's do, and not per group, as fused ones do."""
    return type(leaf.inner).__module__.startswith("torch.optim")


def set_step(leaf: Leaf, held: Held, step: float) -> None:
    """Set the step count of a parameter that torch's optimizer steps on."""
    for stepped in held.group["params"]:
        state = leaf.inner.state.get(stepped)
        if state and (stepped is held.main or stepped is held.parameter):
            state["step"] = torch.tensor(float(step), dtype=torch.float32)


def data_parallel_replicas(*, expert: bool) -> tuple[int, int]:
    """Return ``(position, count)`` of this rank among those that hold the same model weights; (0, 1) if unknown."""
    if not parallel_state.is_initialized():
        return 0, 1
    try:
        if expert:
            return int(parallel_state.get_expert_data_parallel_rank()), int(
                parallel_state.get_expert_data_parallel_world_size()
            )
        return (
            int(parallel_state.get_data_parallel_rank(with_context_parallel=True)),
            int(parallel_state.get_data_parallel_world_size(with_context_parallel=True)),
        )
    except (AssertionError, AttributeError, TypeError):
        return 0, 1


def is_expert(parameter: Any, key: str) -> bool:
    """Whether the copies of this parameter are those of the expert data parallel group.

    ``allreduce`` is False for experts only with expert parallelism. The key identifies experts in all cases.
    """
    return not getattr(parameter, "allreduce", True) or keys.is_expert(key)


_SIZES = {
    "tensor": "get_tensor_model_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
    "virtual_pipeline": "get_virtual_pipeline_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "expert_tensor": "get_expert_tensor_parallel_world_size",
    "data": "get_data_parallel_world_size",
}


def topology() -> dict[str, Any]:
    """Return the parallel degrees of the running job, for the manifest."""
    found: dict[str, Any] = {"world_size": torch.distributed.get_world_size()}
    if parallel_state.is_initialized():
        for name, getter in _SIZES.items():
            try:
                value = getattr(parallel_state, getter)()
            except (AssertionError, AttributeError, TypeError):
                continue
            if value is not None:
                found[name] = int(value)
    return found


def model() -> Model:
    """Return the facts about the model from the arguments of Megatron's training scripts. Empty without the scripts."""
    arguments = global_arguments()
    found = Model.of_megatron(arguments)
    counted = {"vocab": _vocabulary(arguments), "tokens": tokens()}
    positive = {name: count for name, count in counted.items() if type(count) is int and count > 0}
    return Model(found.family, {**found.facts, **positive})


def tokens() -> int | None:
    """Return the number of entries of the scripts' tokenizer, without padding; None if unknown or without the scripts."""
    found = getattr(_tokenizer(), "vocab_size", None)
    return found if type(found) is int and found > 0 else None


def _tokenizer() -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)


def _vocabulary(arguments: Any) -> int | None:
    """Return the number of entries without padding from the arguments, which have it for tokenizers without a file.

    Up to 0.16, ``--vocab-size`` of the NullTokenizer does not count its end-of-document token, which the model has.
    """
    entries = getattr(arguments, "vocab_size", None)
    if entries is not None and getattr(arguments, "tokenizer_type", None) == "NullTokenizer":
        return tokens()
    return entries


def config_fields() -> list[str]:
    """Return the fields of ``TransformerConfig`` and ``MLATransformerConfig``, without those of ``ModelParallelConfig``."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import transformer_config

    kinds = [transformer_config.TransformerConfig, getattr(transformer_config, "MLATransformerConfig", None)]
    names = dict.fromkeys(found.name for kind in kinds if kind is not None for found in dataclasses.fields(kind))
    parallel = {found.name for found in dataclasses.fields(ModelParallelConfig)}
    return [name for name in names if name not in parallel]


def coordinates() -> dict[str, int]:
    """Return this rank's pipeline, tensor, expert and data parallel rank. The last one includes context parallelism."""
    if not parallel_state.is_initialized():
        return {"pipeline": 0, "tensor": 0, "expert": 0, "data": torch.distributed.get_rank()}
    return {
        "pipeline": int(parallel_state.get_pipeline_model_parallel_rank()),
        "tensor": int(parallel_state.get_tensor_model_parallel_rank()),
        "expert": int(parallel_state.get_expert_model_parallel_rank()),
        "data": int(parallel_state.get_data_parallel_rank(with_context_parallel=True)),
    }


def process_groups() -> dict[str, list[Any]]:
    """Return this rank's process groups by Megatron's names, such as ``tensor model parallel`` (core/parallel_state.py)."""
    found: dict[str, list[Any]] = {}
    for name, value in vars(parallel_state).items():
        if name.isupper() and "_GROUP" in name and "RANKS" not in name:
            label = name.strip("_").partition("_GROUP")[0].lower().replace("_", " ")
            groups = value if isinstance(value, list) else [value]
            found.setdefault(label, []).extend(g for g in groups if isinstance(g, torch.distributed.ProcessGroup))
    return found


def default_store() -> Any:
    """Return the key-value store that set up the job's process groups."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def dequantized(data: torch.Tensor) -> torch.Tensor:
    """Return an fp8 tensor of TransformerEngine in high precision, and any other tensor unchanged."""
    try:
        from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
    except ImportError:
        return data
    return dequantize_fp8_tensor(data) if is_float8tensor(data) else data


def enqueue(queue: Any, caller: Any, request: Any) -> int:
    """Put a request with its own caller into an ``AsyncCallsQueue``. Returns the index of the call."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    queue.call_idx += 1
    queue.async_calls.append(async_utils._ActiveAsyncRequest(queue.call_idx, caller, request.freeze()))
    return int(queue.call_idx)


def compare_common_state(common: Any) -> None:
    """Warn on every rank whose common state differs from rank 0's, as Megatron does. A collective."""
    compare = getattr(validation, "_validate_common_state_dict", None)
    if compare is not None:
        compare(common)


def global_arguments() -> Any:
    """Return the arguments of Megatron's training scripts; None before they are set, or without the scripts."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def iterations_done() -> int | None:
    """Return how many iterations the training scripts have done before the current one; None outside of their training loop."""
    return getattr(global_arguments(), "curr_iteration", None)


def options() -> Options:
    """Return the options from the flags of Megatron's training scripts, or the defaults without the scripts."""
    return from_flags(global_arguments())


def seed_scripts(options: Any, seed: int) -> None:
    """Seed generators and trackers as the training scripts do when a job starts."""
    from megatron.training import initialize

    accepted = inspect.signature(initialize._set_random_seed).parameters
    given = {
        "data_parallel_random_init": getattr(options, "data_parallel_random_init", False),
        "te_rng_tracker": getattr(options, "te_rng_tracker", False),
        "inference_rng_tracker": getattr(options, "inference_rng_tracker", False),
        "use_cudagraphable_rng": bool(getattr(options, "enable_cuda_graph", False)),
    }
    initialize._set_random_seed(seed, **{key: value for key, value in given.items() if key in accepted})
