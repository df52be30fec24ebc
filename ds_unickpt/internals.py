"""Access to private attributes of DeepSpeed's engine. ``ds_unickpt/partitions.py`` has those of its optimizers.

``getattr`` reads attributes that older versions of DeepSpeed lack. The default is the behaviour of the older versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ZERO_1_2 = "DeepSpeedZeroOptimizer"
ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"
BF16 = "BF16_Optimizer"
FP16_FUSED = "FP16_Optimizer"
FP16_UNFUSED = "FP16_UnfusedOptimizer"


def config_of(engine: Any) -> Mapping[str, Any]:
    """Return the DeepSpeed configuration, which the user passes as a dict, a path or base64."""
    config: Mapping[str, Any] = engine._config._param_dict
    return config


def shape_of(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the full shape of a parameter, also if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def numel_of(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of the full parameter."""
    return math.prod(shape_of(parameter))


def is_zero3(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def wrapper_of(engine: Any) -> str:
    """Return the class name of DeepSpeed's optimizer wrapper, ``plain`` without a wrapper, or ``none`` without optimizer."""
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
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


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a pipeline.

    Attributes:
        number, count: number of this rank's stage, and number of stages.
        ranks: global ranks of this stage, ascending.
    """

    number: int
    count: int
    ranks: tuple[int, ...]


def pipeline_stage(engine: Any) -> PipelineStage | None:
    """Return this rank's pipeline stage (runtime/pipe/topology.py), or None without a pipeline."""
    if not engine.pipeline_parallelism:
        return None
    grid = engine.module._grid  # ``engine.grid`` is set later
    return PipelineStage(int(grid.get_stage_id()), int(grid.pipe_parallel_size), tuple(sorted(grid.dp_group)))


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


def _tensor_parallel(engine: Any) -> bool:
    """Whether the job has tensor or model parallelism. For a pipeline ``mp_world_size`` counts the stages too."""
    size: int = engine.module._grid.get_slice_parallel_world_size() if engine.pipeline_parallelism else engine.mp_world_size
    return size != 1 or int(engine.autotp_size()) > 1


def unsupported_reason(engine: Any) -> str:
    """Return the features of this job that unickpt does not support, as text; '' if there are none."""
    kind, optimizer = wrapper_of(engine), engine.optimizer
    checks = {
        "mixture of experts": engine.has_moe_layers,
        "tensor or model parallelism": _tensor_parallel(engine),
        "node-local storage (checkpoint.use_node_local_storage)": engine.use_node_local_storage(),
        "optimizer offload to NVMe": engine.zero_nvme_offload_optimizer(),
        "parameter offload to NVMe": _device_of(engine.zero_offload_param()) == "nvme",
        "ZeRO++ secondary partitions (zero_hpz_partition_size)": engine.zero_hpz_partition_size() > 1,
        "ZeRO++ quantized weights": engine.zero_quantized_weights(),
        "ZenFlow": bool(getattr(optimizer, "zenflow", False)),
        "partial optimizer offload (offload_optimizer.ratio)": getattr(optimizer, "partial_offload", 1.0) != 1.0,
        f"optimizer wrapper {kind}": kind not in ("plain", "none", ZERO_1_2, ZERO_3, BF16, FP16_FUSED, FP16_UNFUSED),
        "an engine without optimizer under ZeRO": kind == "none" and engine.zero_optimization(),
        "an engine without optimizer under bf16": kind == BF16 and not optimizer.using_real_optimizer,
    }
    found = [name for name, present in checks.items() if present]
    return ", ".join(found)


def _device_of(offload: Any) -> str:
    device = getattr(offload, "device", "none")
    return str(getattr(device, "value", device))


def before_restore(engine: Any) -> None:
    """Release gathered parameters under ZeRO-3. A load then writes into the partitions."""
    prologue = getattr(engine.optimizer, "checkpoint_event_prologue", None)
    if prologue is not None:
        prologue()


def gather_persistent(engine: Any) -> None:
    """Gather ZeRO-3's persistent parameters if the caller has released them. It is a collective in that case.

    DeepSpeed's own ``save_checkpoint`` ends the same way (``checkpoint_event_epilogue``), also after
    ``empty_partition_cache``. Offloaded states stay offloaded.
    """
    persistent = getattr(engine.optimizer, "persistent_parameters", [])
    released = any(p.ds_status.name == "NOT_AVAILABLE" for p in persistent)
    if released and not getattr(engine.optimizer, "offloaded_states", None):
        persistent[0].all_gather(persistent)


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


def grad_scaler(engine: Any) -> Any | None:
    """Return torch's GradScaler, which the engine uses for fp16 with ``torch_autocast``, or None."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def validate_tag(engine: Any, tag: str) -> None:
    """Run DeepSpeed's check that all ranks use the same tag (``checkpoint.tag_validation``)."""
    engine._checkpoint_tag_validation(tag)


def lr_scheduler(engine: Any) -> Any | None:
    return engine.lr_scheduler


def extra_states(engine: Any) -> dict[str, Any | None]:
    """Return the stateful helpers that DeepSpeed itself saves, by name. The value is None for one that the job does not use."""
    loader = engine.training_dataloader
    curriculum = loader is not None and engine.curriculum_learning_enabled()
    return {
        "data_sampler": loader.data_sampler if curriculum else None,
        "random_ltd": engine.random_ltd_scheduler if engine.random_ltd_enabled() else None,
    }


def non_persistent_names(module: torch.nn.Module) -> set[str]:
    """Return the full names of the buffers that are registered with ``persistent=False``."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }


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
        ("pipeline parallel", "pp_proc_group"), ("data parallel", "dp_proc_group"), ("model parallel", "slice_proc_group"),
        ("model", "ds_model_proc_group"),
    ):  # fmt: skip
        found.setdefault(label, []).append(getattr(grid, name, None))
    return {label: [group for group in held if group is not None] for label, held in found.items()}


def default_store() -> Any:
    """Return the key-value store that set up the job's process groups."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    try:
        return store.clone()  # a separate connection, in versions of torch that have it
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
