"""Access to private attributes of DeepSpeed's engine. ``partitions.py`` has those of its optimizers.

``getattr`` reads attributes that older versions of DeepSpeed lack. The default is the behaviour of the older versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import get_process_group_ranks

from ds_unickpt.framework import persistent_parameters

ZERO_1_2 = "DeepSpeedZeroOptimizer"
ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"
ZERO_3_WEIGHTS = "DeepSpeedZeRoOffload"  # partitions the weights of an engine without optimizer
BF16 = "BF16_Optimizer"
FP16_FUSED = "FP16_Optimizer"
FP16_UNFUSED = "FP16_UnfusedOptimizer"
# torch.compile; torch's wrapper of activation checkpointing; DeepSpeed's random-LTD
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "random_ltd_layer"))
_SIZES = ("tensor_size", "corrected_tensor_size", "server_chunk_size")
_OF_RANK = frozenset(("worker_error", "server_error", "momentum_accumulator", *_SIZES))


def config_of(engine: Any) -> Mapping[str, Any]:
    """Return the DeepSpeed configuration, which the user passes as a dict, a path or base64."""
    return json_of(engine._config)


def json_of(config: Any) -> Mapping[str, Any]:
    """Return the configuration of a ``DeepSpeedConfig``."""
    found: Mapping[str, Any] = config._param_dict
    return found


def plain(name: str) -> str:
    """Return a name without the parts that wrappers add to the names of a module or submodule."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_zero3(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def wrapper_of(engine: Any) -> str:
    """Return the class name of DeepSpeed's optimizer wrapper, ``plain`` without a wrapper, or ``none`` without optimizer."""
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ in ("DummyOptim", ZERO_3_WEIGHTS):
        return "none"
    if type(optimizer).__name__ == BF16 and not getattr(optimizer, "using_real_optimizer", True):
        return "none"
    if isinstance(optimizer, torch.optim.Optimizer):
        return "plain"
    return type(optimizer).__name__


def base_optimizer(engine: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer below DeepSpeed's wrapper, or None."""
    kind = wrapper_of(engine)
    if kind == "none":
        return None
    optimizer: torch.optim.Optimizer = engine.optimizer if kind == "plain" else engine.optimizer.optimizer
    return optimizer


def is_muon(optimizer: Any) -> bool:
    """Return whether an optimizer is one of DeepSpeed's Muon."""
    return "muon" in type(optimizer).__name__.lower()


def keys_of_rank(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the states of a 1-bit optimizer that each rank has for itself, or that depend on the number of ranks."""
    return _OF_RANK if type(optimizer).__module__.startswith("deepspeed.runtime.fp16.onebit.") else frozenset()


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a pipeline.

    Attributes:
        number, count: number of this rank's stage, and number of stages.
        ranks: global ranks of this stage, ascending, with all of its tensor-parallel ranks.
    """

    number: int
    count: int
    ranks: tuple[int, ...]


def pipeline_stage(engine: Any) -> PipelineStage | None:
    """Return this rank's pipeline stage (runtime/pipe/topology.py), or None without a pipeline."""
    if not engine.pipeline_parallelism:
        return None
    grid = engine.module._grid  # ``engine.grid`` is set later
    stage = int(grid.get_stage_id())
    return PipelineStage(stage, int(grid.pipe_parallel_size), tuple(sorted(grid.topology().filter_match(pipe=stage))))


def pipeline_layers(module: Any) -> tuple[int, int, Sequence[Any]] | None:
    """Return the layers of a ``PipelineModule`` on this rank (runtime/pipe/module.py); None for another module.

    Returns:
        Number of the first one, number of layers of the whole model, and the layers, which may be functions.
    """
    if not hasattr(module, "forward_funcs") or not hasattr(module, "parts"):
        return None
    return int(module._local_start), int(module.parts[-1]), module.forward_funcs


def micro_batches(engine: Any) -> int | None:
    """Return the number of micro-batches that a pipeline has run, or None without a pipeline.

    With ``seed_layers`` the random numbers of a layer, such as dropout masks, depend on it.
    """
    return int(engine.module.micro_offset) if engine.pipeline_parallelism else None


def set_micro_batches(engine: Any, number: int) -> None:
    """Set the number of micro-batches that a pipeline has run."""
    engine.module.micro_offset = number


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """The module of a ``TiedLayerSpec`` on a pipeline stage that is not the first stage with this module.

    Attributes:
        key: key of the tied layers.
        layer: number of the first layer on this stage that uses the module.
        shared: names in the module of the parameters that DeepSpeed synchronizes with the first stage
            (``tied_weight_attr``). The others have their own values on this stage.
    """

    key: str
    layer: int
    shared: frozenset[str]


def tied_copies(module: Any) -> tuple[TiedCopy, ...]:
    """Return the tied modules of a ``PipelineModule`` that another stage owns (runtime/pipe/module.py); () otherwise."""
    found = []
    for key, comm in getattr(module, "tied_comms", {}).items():
        if module.global_rank == comm["ranks"][0]:
            continue
        own = range(module._local_start, module._local_stop)
        layer = next(at for at in own if getattr(module._layer_specs[at], "key", None) == key)
        synchronized = {id(module._recursive_getattr(comm["module"], name)) for name in comm["weight_attr"]}
        parameters = comm["module"].named_parameters(remove_duplicate=False)
        found.append(TiedCopy(key, layer, frozenset(name for name, p in parameters if id(p) in synchronized)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one ``deepspeed.moe.layer.MoE``, or of one layer of AutoEP, on this rank.

    Attributes:
        name: name in the module of the list of experts: ``block.moe.deepspeed_moe.experts.deepspeed_experts``. For AutoEP, of
            the module whose parameters have the experts: ``block.mlp.experts``.
        first, count: global number of the first expert on this rank, and number of experts on it.
        degree: number of ranks that share the experts of the layer out among them (expert parallelism).
        ranks: global ranks with the same experts as this one, ascending (the expert-data-parallel group).
        stacked: each parameter has all experts of the rank, along its first dimension (AutoEP).
        slices: global ranks that have the other slices of these experts, this rank among them, ascending: the tensor-parallel
            ranks, if they divide each expert (``enable_expert_tensor_parallelism``). () if every rank has whole experts.
    """

    name: str
    first: int
    count: int
    degree: int
    ranks: tuple[int, ...]
    stacked: bool = False
    slices: tuple[int, ...] = ()

    @property
    def having(self) -> tuple[int, ...] | None:
        """Global ranks that have a part of these experts, ascending; None if all ranks of the stage have one.

        Of the ranks with other slices, those beside this rank: enough to tell which rank is the first.
        """
        return None if self.stacked else tuple(sorted({*self.ranks, *self.slices}))


EXPERTS = "deepspeed_experts"
OF_EXPERT = re.compile(rf"(.*\b{EXPERTS})\.(\d+)(\..+)?")  # layer, number of the expert, rest of a name


Submodules = tuple[tuple[str, torch.nn.Module], ...]


def submodules(module: torch.nn.Module) -> Submodules:
    """Return a module and its submodules under all of their names. A walk through a large model takes milliseconds."""
    return tuple(module.named_modules(remove_duplicate=False))


def expert_layers(children: Submodules) -> tuple[ExpertLayer, ...]:
    """Return the expert layers of a module (moe/layer.py, utils/groups.py); () if it has none."""
    from deepspeed import comm as dist
    from deepspeed.moe.sharded_moe import MOELayer
    from deepspeed.utils import groups

    found = []
    child: Any
    for name, child in children:
        stacked = is_auto_expert_layer(child)
        if (stacked or isinstance(child, MOELayer)) and child.ep_group is not None:
            count = int(child.num_local_experts)
            replicas = get_process_group_ranks(groups._get_expert_data_parallel_group(child.ep_group_name))
            degree = dist.get_world_size(group=child.ep_group)
            found.append(ExpertLayer(
                f"{name}.experts{'' if stacked else f'.{EXPERTS}'}".lstrip("."), dist.get_rank(group=child.ep_group) * count,
                count, degree, tuple(sorted(replicas)), stacked, _slices_of_experts(degree * len(replicas)),
            ))  # fmt: skip
    return tuple(found)


def _slices_of_experts(ranks: int) -> tuple[int, ...]:
    """Return ``ExpertLayer.slices``. ``ranks``: number of ranks among which whole experts and their copies are laid out.

    These are the data-parallel ranks if the tensor-parallel ranks divide each expert, and all ranks of the stage if not
    (``_create_process_groups`` of moe/layer.py).
    """
    from deepspeed import comm as dist
    from deepspeed.utils import bwc, groups

    tensor = bwc.bwc_tensor_model_parallel_world_size(groups.mpu)
    stages = 1 if groups.mpu is None else bwc.bwc_pipeline_parallel_world_size(groups.mpu)
    if tensor == 1 or ranks * tensor * stages != dist.get_world_size():
        return ()
    return tuple(sorted(get_process_group_ranks(bwc.bwc_tensor_model_parallel_group(groups.mpu))))


def parameters_of_routing(children: Submodules) -> frozenset[int]:
    """Return the ids of the parameters of DeepSpeed's own modules beside the experts, which every rank has whole."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.sharded_moe import TopKGate

    gates = [child for _, child in children if isinstance(child, TopKGate)]
    mixers = [child.coefficient for _, child in children if isinstance(child, MoE) and child.use_residual]
    return frozenset(id(parameter) for child in (*gates, *mixers) for parameter in child.parameters())


def stacked_layer(name: str, layers: Mapping[str, ExpertLayer]) -> ExpertLayer | None:
    """Return the layer of AutoEP to which a parameter with experts belongs; None for other names."""
    layer = layers.get(name.rpartition(".")[0])
    return layer if layer is not None and layer.stacked else None


def layer_of(name: str, layers: Mapping[str, ExpertLayer]) -> ExpertLayer | None:
    """Return the layer of an expert, by the name of something in it; None outside of experts."""
    if not layers:
        return None
    found = OF_EXPERT.fullmatch(name)
    return stacked_layer(name, layers) if found is None else layers.get(found[1])


def is_auto_expert_layer(child: Any) -> bool:
    """Whether a module is a layer of AutoEP. Releases before 0.19 have none."""
    return type(child).__name__ == "AutoEPMoELayer"


def auto_experts_of(layer: Any) -> list[int]:
    """Return the global numbers of the experts of a layer of AutoEP on this rank, in the order of its parameters."""
    from deepspeed.checkpoint.autoep_affine import autoep_experts_for_rank

    return [int(each) for each in autoep_experts_for_rank(layer.expert_placement_descriptor, layer.ep_rank)]


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether DeepSpeed reduces the gradient of a parameter over its expert-data-parallel group (moe/utils.py)."""
    return getattr(parameter, "allreduce", True) is False


def open_window(engine: Any) -> str:
    """Return of which micro batches the gradients are accumulated; '' if the last one completed an optimizer step.

    A pipeline always completes a step. A loop that says itself where a step ends, as Accelerate does, says so of the last one.
    """
    ends_step = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if engine.pipeline_parallelism or ends_step:
        return ""
    if ends_step is not None:
        return "the micro batches"
    count = int(engine.gradient_accumulation_steps())
    trained = int(engine.micro_steps) % count
    return f"{trained} of {count} micro batches" if trained else ""


def validate_tag(engine: Any, tag: str) -> None:
    """Compare the tags of all ranks as DeepSpeed's own save does. A collective.

    Raises:
        AssertionError: they differ, and ``checkpoint.tag_validation`` is ``Fail``.
    """
    engine._checkpoint_tag_validation(tag)


def before_restore(engine: Any) -> None:
    """Release gathered parameters under ZeRO-3. A load then writes into the partitions."""
    prologue = getattr(engine.optimizer, "checkpoint_event_prologue", None)
    if prologue is not None:
        prologue()
    elif type(engine.optimizer).__name__ == ZERO_3_WEIGHTS:
        engine.optimizer.partition_all_parameters()  # the next forward pass gathers them again


def gather_persistent(engine: Any) -> None:
    """Gather ZeRO-3's persistent parameters if the caller has released them. It is a collective in that case.

    DeepSpeed's own ``save_checkpoint`` ends the same way (``checkpoint_event_epilogue``), also after
    ``empty_partition_cache``. Offloaded states stay offloaded.
    """
    persistent = getattr(engine.optimizer, "persistent_parameters", []) if wrapper_of(engine) == ZERO_3 else []
    released = any(p.ds_status.name == "NOT_AVAILABLE" for p in persistent)
    if released and not getattr(engine.optimizer, "offloaded_states", None):
        persistent_parameters.gather(persistent)
        persistent[0].all_gather(persistent)


def make_checkpoint_engine(engine: Any) -> None:
    """Let DeepSpeed make its checkpoint engine, which it does not for an engine without optimizer under ZeRO-3."""
    if engine.checkpoint_engine is None and type(engine.optimizer).__name__ == ZERO_3_WEIGHTS:
        engine._configure_checkpointing()


def loss_scaler(engine: Any) -> Any | None:
    """Return the live object that holds the fp16 loss scale, or None if the job does not scale its loss."""
    for name in ("loss_scaler", "loss_scale_config"):
        scaler = getattr(engine.optimizer, name, None)
        if scaler is not None:
            return scaler if engine.fp16_enabled() else None
    return engine.optimizer if hasattr(engine.optimizer, "cur_scale") and engine.fp16_enabled() else None


SCALER_FIELDS = (
    "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "min_loss_scale",
    "delayed_shift", "cur_hysteresis", "consecutive_hysteresis",
)  # fmt: skip


def scaler_values(scaler: Any) -> dict[str, Any]:
    """Return the fields of a loss scale."""
    return {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}


def grad_scaler(engine: Any) -> Any | None:
    """Return torch's GradScaler, which the engine uses for fp16 with ``torch_autocast``, or None."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def renew_last_lr(scheduler: Any) -> None:
    """Set what ``get_last_lr`` of a scheduler of DeepSpeed returns. Its ``load_state_dict`` leaves the value of before."""
    if type(scheduler).__module__.startswith("deepspeed.") and getattr(scheduler, "_last_lr", None) is not None:
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


SAMPLER = "data_sampler"


def extra_states(engine: Any) -> dict[str, Any | None]:
    """Return the stateful helpers that DeepSpeed itself saves, by name. The value is None for one that the job does not use."""
    loader = engine.training_dataloader
    curriculum = loader is not None and engine.curriculum_learning_enabled()
    return {
        SAMPLER: loader.data_sampler if curriculum else None,
        "random_ltd": engine.random_ltd_scheduler if engine.random_ltd_enabled() else None,
    }


def restart_curriculum(engine: Any) -> None:
    """Let the schedule of sequence lengths (``curriculum_learning`` of the JSON) follow the step again.

    It depends on the step alone, but never goes back from the highest difficulty.
    """
    schedule = getattr(engine, "curriculum_scheduler_legacy", None)
    if schedule is not None and "min_difficulty" in getattr(schedule, "state", {}):
        schedule.state["current_difficulty"] = schedule.state["min_difficulty"]
        schedule.update_difficulty(int(engine.global_steps) + 1)


def non_persistent_names(children: Submodules) -> set[str]:
    """Return the full names of the buffers that are registered with ``persistent=False``."""
    return {f"{prefix}.{name}".lstrip(".") for prefix, child in children for name in child._non_persistent_buffers_set}


def parameters_of(children: Submodules) -> dict[str, torch.nn.Parameter]:
    """Return every parameter under all of its names, in the order of ``named_parameters(remove_duplicate=False)``."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, child in children
        for name, parameter in child._parameters.items()
        if parameter is not None
    }


def buffers_of(children: Submodules) -> dict[str, torch.Tensor]:
    """Return every distinct buffer under its first name, in the order of ``named_buffers()``."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, child in children:
        for name, buffer in child._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), (f"{prefix}.{name}".lstrip("."), buffer))
    return dict(found.values())


def process_groups(engine: Any) -> dict[str, list[Any]]:
    """Return this rank's process groups by DeepSpeed's names (utils/groups.py, runtime/pipe/topology.py)."""
    from deepspeed.utils import groups

    found = {
        "tensor parallel": [groups._TENSOR_MODEL_PARALLEL_GROUP],
        "ZeRO++ parameter": [groups._ZERO_PARAM_INTRA_PARALLEL_GROUP],
        "expert parallel": list(groups._EXPERT_PARALLEL_GROUP.values()),
        "expert data parallel": list(groups._EXPERT_DATA_PARALLEL_GROUP.values()),
        "data parallel": [groups._DATA_PARALLEL_GROUP, getattr(engine, "data_parallel_group", None)],
        "sequence data parallel": [getattr(engine, "seq_data_parallel_group", None)],
        "sequence parallel": [getattr(engine, "seq_parallel_group", None)],
    }
    grid = getattr(engine, "grid", None)
    for label, name in (
        ("pipeline parallel", "pp_proc_group"),
        ("data parallel", "dp_proc_group"),
        ("model parallel", "slice_proc_group"),
        ("model", "ds_model_proc_group"),
    ):
        found.setdefault(label, []).append(getattr(grid, name, None))
    return {label: [group for group in held if group is not None] for label, held in found.items()}


def copy_groups(engine: Any, parameters: Iterable[Any]) -> dict[str, Any]:
    """Return the process groups whose ranks hold copies of some parameters: '' is that of data, others are of experts.

    The order is the same on all ranks of the groups.
    """
    from deepspeed.utils import groups

    names = sorted({each.group_name for each in parameters if is_expert(each)})
    return {"": engine.data_parallel_group, **{name: groups._get_expert_data_parallel_group(name) for name in names}}


def copy_group_of(parameter: Any) -> str:
    """Return the key in ``copy_groups`` of the group of a parameter."""
    return str(parameter.group_name) if is_expert(parameter) else ""


def groups_within_layers(engine: Any) -> list[Any]:
    """Return this rank's process groups whose ranks exchange activations inside of a layer."""
    found = process_groups(engine)
    groups = [group for label in ("tensor parallel", "sequence parallel", "expert parallel") for group in found[label]]
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    getter = next((getter for name in names if (getter := getattr(engine.mpu, name, None)) is not None), None)
    groups += [getter()] if getter is not None else []
    return [group for at, group in enumerate(groups) if group is not None and group not in groups[:at]]


def default_store() -> Any:
    """Return the key-value store that set up the job's process groups."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    try:
        return store.clone()  # a separate connection, in versions of torch that have it
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


# ---------------------------------------------------------------- reduction of gradients


def sparse_gradients(engine: Any) -> bool:
    """Whether DeepSpeed sends the gradients of embeddings as indices and rows."""
    return bool(getattr(engine._config, "sparse_gradients_enabled", False))


def contiguous_gradients(engine: Any) -> bool:
    """Whether ZeRO 1 and 2 copy gradients into buckets before it reduces them."""
    return bool(getattr(engine.optimizer, "contiguous_gradients", False))


def bucket_parameters(optimizer: Any, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return the parameters of the gradients in the open bucket of ZeRO 1 and 2, in their order (``average_tensor``)."""
    return [optimizer.bit16_groups[group][at] for group, at, _ in optimizer.ipg_buckets[dtype].params]


def loss_scale(engine: Any) -> float:
    """Return the factor by which the gradients of a backward pass are too large; 1 without fp16."""
    scaler, autocast = loss_scaler(engine), grad_scaler(engine)
    if autocast is not None:
        return float(autocast.get_scale())
    return 1.0 if scaler is None else float(scaler.cur_scale)


def uses_loco(engine: Any) -> bool:
    """Whether ZeRO-3 keeps what its quantised gradients lose (LoCo-ZeRO++, before 0.19.8)."""
    return getattr(engine._config.zero_config, "zeropp_loco_param", None) is not None
