"""``unickpt plan pipeline``: cut the layers of a model into pipeline stages, by measured times and memory."""

from __future__ import annotations

import argparse
import shlex
from itertools import pairwise
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_ms
from unickpt.cli.plan_command import JSON_SCHEMA, unmet
from unickpt.diagnosis.layer_costs.measured import MeasuredLayer
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring import SUFFIX
from unickpt.planning.plan.layers import cost_of, megatron_arguments, vllm_partition
from unickpt.planning.plan.partition import Device, StageCut, Unmet, plan_stages
from unickpt.planning.plan.records import Recorded, recorded
from unickpt.planning.plan.sources import read_layers
from unickpt.planning.replay.programs import PipelineSchedule, step_time
from unickpt.planning.replay.sources import read_trace


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan and print."""
    files, devices = read_layers(args.layers), _devices(args)
    microbatches = args.microbatches or 4 * len(devices)
    has_rings = files.ranks and all(any(each.glob(f"*{SUFFIX}")) for each in args.layers)
    known = recorded(read_trace(list(map(str, args.layers))), files.ranks) if has_rings else Recorded()
    costs = [cost_of(each, args.bytes_per_parameter) for each in files.layers]
    found = plan_stages(costs, devices, microbatches, reorder=args.reorder)
    if isinstance(found, Unmet):
        return unmet(found.binds.value, str(found), args, out)
    document = _document(found, files.layers, devices, microbatches, known)
    if args.json:
        out.json({"schema": JSON_SCHEMA, "microbatches": microbatches, **document})
    else:
        _tell(document, out)
    return SOUND


def _devices(args: argparse.Namespace) -> list[Device]:
    given = [Device(*each) for each in args.device]
    if not args.stages:
        if not given:
            raise ConfigError("name the number of stages with --stages, or each device with --device")
        return given
    if args.stages < 1 or len(given) not in (0, 1, args.stages):
        raise ConfigError(f"{args.stages} stages need one --device for all or one for each, not {len(given)}")
    return given if len(given) == args.stages else (given or [Device()]) * args.stages


def _document(
    found: StageCut, layers: list[MeasuredLayer], devices: list[Device], microbatches: int, known: Recorded
) -> dict[str, Any]:
    roles = [each.role for each in layers]
    steps = {each.value: predicted_s(found, layers, devices, microbatches, known, each) for each in PipelineSchedule}
    return {
        "step_s": steps, "parts": list(found.bounds), "layers": list(found.counts), "times_s": list(found.times_s),
        "devices": [devices[kind].name for kind in found.kinds], "megatron_arguments": megatron_arguments(roles, found.bounds),
        "vllm_environment": {"VLLM_PP_LAYER_PARTITION": vllm_partition(roles, found.bounds)},
    }  # fmt: skip


def predicted_s(
    found: StageCut,
    layers: list[MeasuredLayer],
    devices: list[Device],
    microbatches: int,
    known: Recorded,
    schedule: PipelineSchedule,
) -> float:
    """Return the simulated step in seconds."""
    parts = [layers[begin:end] for begin, end in pairwise(found.bounds)]
    speeds = [devices[kind].speed for kind in found.kinds]
    rest_s = known.rest_s / 2
    forward = [[(rest_s + sum(each.forward_s for each in part)) / speed] for part, speed in zip(parts, speeds, strict=True)]
    backward = [[(rest_s + sum(each.backward_s for each in part)) / speed] for part, speed in zip(parts, speeds, strict=True)]
    size = max((each.input_bytes for each in layers[1:]), default=0)
    return step_time(forward, backward, microbatches, known.links.seconds(Op.SEND, 2, size), schedule)


def _tell(document: dict[str, Any], out: Output) -> None:
    steps = document["step_s"]
    out.line(f"predicted step: {human_ms(steps['megatron'])} (Megatron), {human_ms(steps['deepspeed'])} (DeepSpeed)")
    rows = [
        (stage, device, f"{begin} to {end - 1}", human_ms(seconds))
        for stage, (device, (begin, end), seconds) in enumerate(
            zip(document["devices"], pairwise(document["parts"]), document["times_s"], strict=True)
        )
    ]
    out.table("stages", ("stage", "device", "layers", "time of a microbatch"), rows)
    out.line()
    out.line(f"Megatron: {shlex.join(document['megatron_arguments'])}")
    out.line(f"DeepSpeed: ds_unickpt.stage_layers(layers, {document['parts']})")
    out.line(f"vLLM: VLLM_PP_LAYER_PARTITION={document['vllm_environment']['VLLM_PP_LAYER_PARTITION']}")
