"""What DeepSpeed saves with its own files although the job has the ``unickpt`` key. One table.

A save and a load check a job against ``FALLBACKS``. ``unickpt hooks status`` lists it, and the guide has it as a table
(``unickpt hooks status --fallbacks``). Other modules raise ``UnsupportedLayoutError`` only through a row of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_unickpt.framework import autotp, internals, megatron_layers, tensor_parallel
from ds_unickpt.framework.internals import BF16, EXPERTS, FP16_FUSED, FP16_UNFUSED, ZERO_1_2, ZERO_3, wrapper_of
from unickpt.base.errors import UnsupportedLayoutError

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")  # torchrun, DeepSpeed's launcher, MPI
_SUPER_OFFLOAD = "SuperOffloadOptimizer_Stage3"
WRAPPERS = ("plain", "none", ZERO_1_2, ZERO_3, BF16, FP16_FUSED, FP16_UNFUSED)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A kind of job that DeepSpeed saves by itself.

    Attributes:
        feature: what the job uses.
        why: why unickpt does not save it.
        found: what an engine uses of it, as text; '' if it does not. None: capturing the state finds it.
        resumable: DeepSpeed's own files of such a job can be resumed. If not, nothing is saved: DeepSpeed would load them
            without an error, into a model with other weights.
    """

    feature: str
    why: str
    found: Callable[[Any], str] | None = None
    resumable: bool = True

    def error(self, what: str) -> UnsupportedLayoutError:
        """Return the error that makes DeepSpeed save by itself, if it can. ``what`` says what was found."""
        return UnsupportedLayoutError(what).unless(self.resumable)


def _when(text: str, present: Callable[[Any], bool]) -> Callable[[Any], str]:
    return lambda engine: text if present(engine) else ""


def _tensor_parallel(engine: Any) -> str:
    """Return a combination with tensor parallelism. In a pipeline of DeepSpeed ``mp_world_size`` counts the stages too."""
    degree = tensor_parallel.degree(engine)
    if autotp.degree(engine) > 1 and (engine.pipeline_parallelism or _sequence(engine) > 1):
        return ""  # ``AUTOTP_COMBINED`` names it
    if not engine.pipeline_parallelism and engine.mp_world_size != degree:
        return f"an mpu with {engine.mp_world_size} model-parallel ranks, of which {degree} are tensor-parallel"
    return ""


def _tensors_on_a_mesh(engine: Any) -> str:
    several = tensor_parallel.degree(engine) > 1 and _several_data_groups(engine, tensor_parallel.degree(engine))
    if autotp.degree(engine) > 1 or not several:
        return ""
    return "tensor parallelism with sequence parallelism in several data-parallel groups"


def _divided_experts(engine: Any) -> str:
    name = autotp.divided_expert(engine) if engine.has_moe_layers else ""
    return f"AutoTP that divides layers of experts ({name})" if name else ""


def _tensors_and_sequences(engine: Any) -> str:
    both = tensor_parallel.degree(engine) > 1 and autotp.degree(engine) == 1 and _sequence(engine) > 1
    if both and engine.zero_optimization_partition_weights():
        return "tensor parallelism with sequence parallelism under ZeRO 3"
    return ""


def _autotp_combined(engine: Any) -> str:
    if autotp.degree(engine) == 1:
        return ""
    if engine.pipeline_parallelism:
        return "AutoTP in a pipeline"
    return "AutoTP with sequence parallelism" if _sequence(engine) > 1 else ""


def _sequence(engine: Any) -> int:
    """Return the number of sequence-parallel ranks."""
    return int(getattr(engine, "sequence_parallel_size", 1))


def _several_data_groups(engine: Any, tensors: int) -> bool:
    """Whether a job has sequence parallelism, and several data-parallel groups for a tensor-parallel rank."""
    return _sequence(engine) > 1 and int(engine.seq_dp_world_size) * tensors != int(engine.world_size)


def _experts_on_a_mesh(engine: Any) -> str:
    if not engine.has_moe_layers or not _several_data_groups(engine, tensor_parallel.degree(engine)):
        return ""
    return "mixture of experts with sequence parallelism through a mesh"


def _nested_experts(engine: Any) -> str:
    if not engine.has_moe_layers:
        return ""
    nested = any(layer.name.count(EXPERTS) > 1 for layer in internals.expert_layers(internals.submodules(engine.module)))
    return "experts within experts" if nested else ""


def _undescribed_auto_experts(engine: Any) -> str:
    if not engine.has_moe_layers or not any(map(internals.is_auto_expert_layer, engine.module.modules())):
        return ""
    try:
        import deepspeed.checkpoint.autoep_affine  # noqa: F401
    except ImportError:
        return "AutoEP of a DeepSpeed release that does not describe its layout (0.19.8 does)"
    return ""


def _parameters_of_experts(engine: Any) -> str:
    if not engine.has_moe_layers or _experts_on_a_mesh(engine) or _nested_experts(engine):
        return ""
    layers = {layer.name: layer for layer in internals.expert_layers(internals.submodules(engine.module))}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        layer, _, _ = name.rpartition(f".{EXPERTS}.")
        inside = layers.get(f"{layer}.{EXPERTS}") or internals.stacked_layer(name, layers)
        if internals.is_expert(parameter) and inside is None:
            return f"parameters with allreduce=False outside of experts ({name})"
        if inside is not None and inside.degree > 1 and not internals.is_expert(parameter):
            return f"parameters in experts that DeepSpeed does not treat as such ({name})"
    return ""


def _several_local_folders(engine: Any) -> bool:
    """Whether ranks write to the disks of different hosts. Launchers give the number of ranks of a host in the environment."""
    world = int(engine.world_size)
    local = {int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdigit()}
    return bool(engine.use_node_local_storage()) and world > 1 and world not in local


def _unknown_wrapper(engine: Any) -> str:
    kind = wrapper_of(engine)
    return "" if kind in (*WRAPPERS, _SUPER_OFFLOAD) else f"optimizer wrapper {kind}"


AUTOTP_COMBINED = Fallback(
    "AutoTP in a pipeline, or with sequence parallelism",
    "DeepSpeed 0.19.8 itself cannot train it: the tensor-parallel ranks are also the data-parallel or sequence-parallel ranks, "
    "so `AssertionError: Data inconsistency within the TP group` ends the first step",
    _autotp_combined,
)
TENSOR_PARALLEL = Fallback(
    "an `mpu` with a pipeline of its own, without `PipelineModule`",
    "nothing tells which layers of the whole model a stage has: `layers.0` of two stages are different parameters of one name",
    _tensor_parallel,
)
AUTOTP_EXPERTS = Fallback(
    "AutoTP that divides layers in experts of `deepspeed.moe` without `enable_expert_tensor_parallelism`",
    "DeepSpeed 0.19.8 sends other tokens to each tensor-parallel rank, and the divided layers add up what belongs to different "
    "tokens: the losses are not those of the model",
    _divided_experts,
)
TENSORS_ON_A_MESH = Fallback(
    "tensor parallelism through an `mpu` with sequence parallelism through `mesh_param`",
    "DeepSpeed 0.19.8 lays the mesh over all ranks, so it averages the gradients of different parts (from its source)",
    _tensors_on_a_mesh,
)
TENSORS_AND_SEQUENCES = Fallback(
    "an `mpu` with tensor and sequence parallelism under ZeRO 3",
    "DeepSpeed 0.19.8 does not reduce the gradients of the sequence-parallel ranks there, so their weights differ after a step",
    _tensors_and_sequences,
)
MPU_CONTRADICTS = Fallback(
    "an `mpu` whose tensor-parallel rank or number of ranks is not that of its own process group",
    "the ranks would store and load the parts of other ranks, also in DeepSpeed's own files, so nothing is saved; the error "
    "names the rank",
    megatron_layers.contradiction,
    resumable=False,
)
TENSOR_LAYOUT = Fallback(
    "layers of AutoTP that DeepSpeed does not describe, such as those for GPT-2's `Conv1D`; DeepSpeed without "
    "`deepspeed/checkpoint/affine.py`",
    "a wrong description would be a wrong checkpoint",
    autotp.undescribed,
)
MPU_LAYOUT = Fallback(
    "tensor parallelism through an `mpu`, with a parameter that neither `universal_checkpoint_info` of the model nor "
    "`tensor_model_parallel` of the parameter describes",
    "a guess would be a wrong checkpoint; the warning names the parameter",
    megatron_layers.undescribed,
)
EXPERTS_ON_A_MESH = Fallback(
    "experts with sequence parallelism through `mesh_param` (with an `mpu`, unickpt saves them)",
    "DeepSpeed 0.19.8 does not resume it either: its files have the state of one rank of each sequence, and the losses change. "
    "So nothing is saved",
    _experts_on_a_mesh,
    resumable=False,
)
NESTED_EXPERTS = Fallback(
    "experts within experts",
    "DeepSpeed 0.19.8 does not resume it either: the losses change after a load. So nothing is saved",
    _nested_experts,
    resumable=False,
)
AUTO_EXPERTS = Fallback(
    "AutoEP of DeepSpeed without `deepspeed/checkpoint/autoep_affine.py`",
    "a wrong description would be a wrong checkpoint",
    _undescribed_auto_experts,
)
EXPERT_PARAMETERS = Fallback(
    "parameters in experts that DeepSpeed does not treat as an expert's, such as adapters added later; "
    "parameters outside of experts with `allreduce=False`",
    "DeepSpeed averages the gradients of different parameters",
    _parameters_of_experts,
)
NODE_LOCAL = Fallback(
    "`checkpoint.use_node_local_storage` on several hosts",
    "a checkpoint is one folder that all ranks see; on one host they do",
    _when("node-local storage on several hosts (checkpoint.use_node_local_storage)", _several_local_folders),
)
QUANTIZED = Fallback(
    "ZeRO++ quantized weights (`zero_quantized_weights`)",
    "not tested: DeepSpeed has no CPU operator for it",
    _when("ZeRO++ quantized weights", lambda engine: bool(engine.zero_quantized_weights())),
)
ZENFLOW = Fallback(
    "ZenFlow",
    "DeepSpeed 0.19.8 does not resume it either: it does not restore its second optimizer, and the losses change",
    _when("ZenFlow", lambda engine: bool(getattr(engine.optimizer, "zenflow", False))),
)
SUPER_OFFLOAD = Fallback(
    "SuperOffload",
    "DeepSpeed 0.19.8 does not resume it either: the moments are in a process of their own, which no checkpoint has (from its "
    "source; it needs CUDA)",
    _when("SuperOffload", lambda engine: wrapper_of(engine) == _SUPER_OFFLOAD),
)
OWN_OPTIMIZER_STATE = Fallback(
    "an optimizer with tensors beside torch's `state` and `param_groups`: among what its own `state_dict` adds, or those of an "
    "optimizer inside it (Lookahead)",
    "nothing tells to which parameters they belong. Numbers that its `state_dict` adds are saved",
)
OWN_MODULE_STATE = Fallback(
    "a module whose own `state_dict` has entries beside parameters, buffers and extra states, unless it is frozen, as a "
    "quantized base model is",
    "only the module's code can read them. Buffers, and what `get_extra_state` returns, are saved",
)
UNKNOWN_WRAPPER = Fallback(
    "an optimizer wrapper of DeepSpeed that this release does not know",
    "the layout of its buffers is unknown",
    _unknown_wrapper,
)
UNKNOWN_BUFFERS = Fallback(
    "buffers of an optimizer wrapper that do not have the known layout, as in a new DeepSpeed release",
    "a wrong description would be a wrong checkpoint",
)

FALLBACKS = (
    AUTOTP_COMBINED, AUTOTP_EXPERTS, TENSOR_PARALLEL, TENSORS_ON_A_MESH, TENSORS_AND_SEQUENCES, MPU_CONTRADICTS,
    TENSOR_LAYOUT, MPU_LAYOUT,
    EXPERTS_ON_A_MESH, NESTED_EXPERTS, AUTO_EXPERTS, EXPERT_PARAMETERS, NODE_LOCAL, QUANTIZED, ZENFLOW,
    SUPER_OFFLOAD, OWN_OPTIMIZER_STATE, OWN_MODULE_STATE, UNKNOWN_WRAPPER, UNKNOWN_BUFFERS,
)  # fmt: skip


def unsupported_reason(engine: Any) -> str:
    """Return the features of this job that unickpt does not support, as text; '' if there are none."""
    return ", ".join(text for _, text in _found(engine))


def _found(engine: Any) -> list[tuple[Fallback, str]]:
    """Return the rows that apply to this job, each with what was found."""
    found = ((fallback, fallback.found(engine)) for fallback in FALLBACKS if fallback.found is not None)
    return [(fallback, text) for fallback, text in found if text]


def require_supported(engine: Any, *, for_load: str = "") -> None:
    """Check that unickpt can describe the state of a job, for a save or for the load of a checkpoint in ``for_load``.

    Raises:
        UnsupportedLayoutError: names the features that it cannot describe.
    """
    found = _found(engine)
    reason = ", ".join(text for _, text in found)
    if reason and for_load:
        raise UnsupportedLayoutError(
            f"{for_load} is a unickpt checkpoint. This job uses {reason}, which unickpt does not support yet."
        )
    if reason:
        raise UnsupportedLayoutError(reason).unless(all(fallback.resumable for fallback, _ in found))
