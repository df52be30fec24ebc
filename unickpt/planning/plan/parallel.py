"""The parallel layout of the next run: tensor, pipeline and data parallelism, chunks of a stage, and size of a microbatch.

Every layout that the numbers of devices, layers and rows allow is rated by its simulated step: layers at their new size, the
communication of tensor parallel groups between them, the schedule of the pipeline, and the sum of gradients. Layouts beyond the
memory limit are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.diagnosis.layer_costs.compute import ComputeCosts
from unickpt.diagnosis.layer_costs.measured import LAYER, MeasuredLayer
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.plan.layers import cost_of, megatron_layout
from unickpt.planning.plan.links import LinkCosts
from unickpt.planning.plan.partition import Device, LayerCost, StageCut, Unmet, plan_stages
from unickpt.planning.replay.programs import in_flight, step_time

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2  # of a parameter in the sum of gradients, and in the gathering of weights
SHARED_BYTES, SHARDED_BYTES = 6.0, 12.0  # of a parameter: weight and gradient; fp32 weight and two moments
_REDUCTIONS = 2  # all-reduces of a tensor parallel group in each forward, and in each backward computation of a layer


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """What is known of the job.

    Attributes:
        layers: its layers, as measured.
        tensor: tensor parallel size of the measured job.
        rows: rows of a microbatch of the measured job.
        compute: predictor of times.
        links: times of transfers.
        rest_s: time of a stage for one microbatch outside of its layers.
    """

    layers: Sequence[MeasuredLayer]
    tensor: int
    rows: int
    compute: ComputeCosts
    links: LinkCosts
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Space:
    """What a layout may be.

    Attributes:
        devices: number of devices.
        batch: rows of a step on all devices.
        memory_bytes: memory of a device.
        per_host: devices of a host. Tensor parallel groups stay within a host.
        tensors: allowed tensor parallel sizes; empty: powers of two up to ``per_host``.
        most_rows: largest number of rows of a microbatch.
        most_chunks: largest number of chunks of a stage.
        sharded: whether optimizer states are divided over data parallel ranks.
    """

    devices: int
    batch: int
    memory_bytes: float = float("inf")
    per_host: int = 8
    tensors: tuple[int, ...] = ()
    most_rows: int = 64
    most_chunks: int = 4
    sharded: bool = True


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One layout.

    Attributes:
        tensor, pipeline, chunks, data: sizes. ``chunks`` is the virtual pipeline size, 1 without interleaving.
        rows: rows of a microbatch.
        microbatches: microbatches of a step of each pipeline.
    """

    tensor: int
    pipeline: int
    chunks: int
    data: int
    rows: int
    microbatches: int

    def __str__(self) -> str:
        interleaved = f" VPP{self.chunks}" if self.chunks > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline}{interleaved} DP{self.data}, {self.microbatches} microbatches of {self.rows}"


@dataclass(frozen=True, slots=True)
class RatedLayout:
    """A layout with its prediction.

    Attributes:
        layout: the layout.
        bounds: first layer of each chunk in the order of the model, and the number of layers.
        step_s: predicted step.
        pipeline_s, gradients_s: its parts: all microbatches, and the sum of gradients.
        memory_bytes: memory of the fullest device.
    """

    layout: PlannedLayout
    bounds: tuple[int, ...]
    step_s: float
    pipeline_s: float
    gradients_s: float
    memory_bytes: float


class LayoutBinds(enum.Enum):
    """Limit that no layout can meet."""

    MEMORY = "memory"
    BATCH = "global batch"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class UnmetLayout:
    """No layout meets the limits.

    Attributes:
        binds: the limit.
        text: what is needed, and what there is.
    """

    binds: LayoutBinds
    text: str


def layouts(space: Space, layers: int) -> Iterator[PlannedLayout]:
    """Yield every layout that divides devices, rows and layers evenly enough to run."""
    allowed = space.tensors or tuple(1 << at for at in range(space.per_host.bit_length()) if 1 << at <= space.per_host)
    for tensor in allowed:
        for pipeline in range(1, min(layers, space.devices) + 1):
            data, left = divmod(space.devices, tensor * pipeline)
            if left or space.batch % max(data, 1):
                continue
            for rows in _divisors(space.batch // data, space.most_rows):
                microbatches = space.batch // data // rows
                for chunks in range(1, space.most_chunks + 1 if pipeline > 1 else 2):
                    if chunks == 1 or (microbatches % pipeline == 0 and pipeline * chunks <= layers):
                        yield PlannedLayout(tensor, pipeline, chunks, data, rows, microbatches)


def _divisors(value: int, most: int) -> list[int]:
    return [each for each in range(1, min(value, most) + 1) if value % each == 0]


def plan_layouts(measured: MeasuredJob, space: Space) -> list[RatedLayout] | UnmetLayout:
    """Return all layouts within the limits, the fastest first, or the limit that binds."""
    tried = list(layouts(space, len(measured.layers)))
    if not tried:
        return UnmetLayout(
            LayoutBinds.BATCH,
            f"no layout of {space.devices} devices divides a global batch of {space.batch} rows and {len(measured.layers)} "
            "layers",
        )
    rated: list[RatedLayout] = []
    least = float("inf")
    for layout in tried:
        found = rate(measured, space, layout)
        if isinstance(found, RatedLayout):
            rated.append(found)
        else:
            least = min(least, found)
    if not rated:
        return UnmetLayout(
            LayoutBinds.MEMORY,
            f"memory binds: the smallest of {len(tried)} layouts needs {least / 1e9:.3f} GB on a device, and a device has "
            f"{space.memory_bytes / 1e9:.3f} GB",
        )
    return sorted(rated, key=lambda each: (each.step_s, each.memory_bytes))


def rate(measured: MeasuredJob, space: Space, layout: PlannedLayout) -> RatedLayout | float:
    """Return the prediction for one layout; the memory in bytes that a device needs if it does not fit."""
    layers = [_resized(measured, layout, each) for each in measured.layers]
    per_parameter = SHARED_BYTES + SHARDED_BYTES / (layout.data if space.sharded else 1)
    costs = [cost_of(each, per_parameter) for each in layers]
    stages = layout.pipeline * layout.chunks
    limit = space.memory_bytes if layout.chunks == 1 else float("inf")
    cut = plan_stages(costs, [Device(memory_bytes=limit)] * stages, layout.microbatches)
    if isinstance(cut, Unmet):
        free = plan_stages(costs, [Device()] * stages, layout.microbatches)
        return memory_of(costs, free.bounds, layout) if isinstance(free, StageCut) else float("inf")
    memory = memory_of(costs, cut.bounds, layout)
    if memory > space.memory_bytes:
        return memory
    chunks = [range(begin, end) for begin, end in zip(cut.bounds[:-1], cut.bounds[1:], strict=True)]
    own = [[chunks[chunk * layout.pipeline + stage] for chunk in range(layout.chunks)] for stage in range(layout.pipeline)]
    rest_s = measured.rest_s / 2
    forward = [[rest_s + sum(layers[at].forward_s for at in part) for part in stage] for stage in own]
    backward = [[rest_s + sum(layers[at].backward_s for at in part) for part in stage] for stage in own]
    size = max((each.input_bytes for each in layers[1:]), default=0)
    across = layout.tensor * layout.data * layout.pipeline > space.per_host
    send_s = measured.links.seconds(Op.SEND, 2, size, leaves_host=across)
    pipeline_s = step_time(forward, backward, layout.microbatches, send_s)
    gradients_s = max(_gradients_s(measured, space, layout, [layers[at] for part in stage for at in part]) for stage in own)
    return RatedLayout(layout, cut.bounds, pipeline_s + gradients_s, pipeline_s, gradients_s, memory)


def memory_of(costs: Sequence[LayerCost], bounds: Sequence[int], layout: PlannedLayout) -> float:
    """Return the memory of the fullest stage in bytes."""
    most = 0.0
    for stage in range(layout.pipeline):
        kept = in_flight(stage, layout.pipeline, layout.microbatches, layout.chunks)
        parts = [range(*bounds[at : at + 2]) for at in range(stage, len(bounds) - 1, layout.pipeline)]
        sizes = [(costs[at], count) for part, count in zip(parts, kept, strict=True) for at in part]
        most = max(most, sum(cost.bytes + count * cost.activation_bytes for cost, count in sizes))
    return most


def _resized(measured: MeasuredJob, layout: PlannedLayout, layer: MeasuredLayer) -> MeasuredLayer:
    """Return a layer at the sizes of a layout, with the communication of its tensor parallel group."""
    reduced = layer.role == LAYER
    before = _reductions_s(measured, measured.tensor, layer.input_bytes) if reduced else 0.0
    bare = replace(layer, forward_s=max(layer.forward_s - before, 0.0), backward_s=max(layer.backward_s - before, 0.0))
    found = measured.compute.resized(bare, layout.rows / measured.rows, layout.tensor / measured.tensor)
    after = _reductions_s(measured, layout.tensor, found.input_bytes) if reduced else 0.0
    return replace(found, forward_s=found.forward_s + after, backward_s=found.backward_s + after)


def _reductions_s(measured: MeasuredJob, tensor: int, size: int) -> float:
    return _REDUCTIONS * measured.links.seconds(Op.ALL_REDUCE, tensor, size)


def _gradients_s(measured: MeasuredJob, space: Space, layout: PlannedLayout, layers: Sequence[MeasuredLayer]) -> float:
    parameters = sum(each.parameters for each in layers)
    across = layout.tensor * layout.data > space.per_host
    if not space.sharded:
        return measured.links.seconds(Op.ALL_REDUCE, layout.data, GRADIENT_BYTES * parameters, leaves_host=across)
    scattered = measured.links.seconds(Op.REDUCE_SCATTER, layout.data, GRADIENT_BYTES * parameters, leaves_host=across)
    return scattered + measured.links.seconds(Op.ALL_GATHER, layout.data, WEIGHT_BYTES * parameters, leaves_host=across)


def megatron_arguments(found: RatedLayout, space: Space, layers: Sequence[MeasuredLayer]) -> list[str]:
    """Return Megatron's arguments for a layout."""
    layout = found.layout
    arguments = [
        "--tensor-model-parallel-size", str(layout.tensor), "--pipeline-model-parallel-size", str(layout.pipeline),
        "--micro-batch-size", str(layout.rows), "--global-batch-size", str(space.batch),
    ]  # fmt: skip
    if layout.pipeline > 1:
        arguments += ["--pipeline-model-parallel-layout", megatron_layout([each.role for each in layers], found.bounds)]
    return arguments + (["--use-distributed-optimizer"] if space.sharded else [])


def deepspeed_json(found: RatedLayout, space: Space) -> dict[str, Any]:
    """Return DeepSpeed's JSON for a layout. The stages of a pipeline are ``bounds``, for ``ds_unickpt.stage_layers``."""
    layout = found.layout
    document: dict[str, Any] = {
        "train_batch_size": space.batch,
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_accumulation_steps": layout.microbatches,
        "zero_optimization": {"stage": 1 if space.sharded else 0},
    }
    return document | ({"tensor_parallel": {"autotp_size": layout.tensor}} if layout.tensor > 1 else {})
