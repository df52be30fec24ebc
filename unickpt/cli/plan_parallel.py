"""``unickpt plan parallel``: the parallel layout of the next run, from the records and the measured layers of a job."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_ms
from unickpt.cli.plan_command import JSON_SCHEMA, unmet
from unickpt.diagnosis.layer_costs.compute import ComputeCosts
from unickpt.diagnosis.layer_costs.measured import MeasuredLayer
from unickpt.diagnosis.layer_costs.store import default_store, remember, remembered
from unickpt.planning.plan.parallel import (
    MeasuredJob,
    RatedLayout,
    Space,
    UnmetLayout,
    deepspeed_json,
    megatron_arguments,
    plan_layouts,
)
from unickpt.planning.plan.records import recorded
from unickpt.planning.plan.sources import read_layers
from unickpt.planning.replay.sources import read_trace


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan and print."""
    store = args.store or default_store()
    files = read_layers([Path(each) for each in args.places])
    layers, known = files.layers, recorded(read_trace(args.places), files.ranks)
    remember(store, layers)
    compute = ComputeCosts([*remembered(store), *layers])
    measured = MeasuredJob(layers, known.tensor, args.micro_batch, compute, known.links, known.rest_s)
    space = Space(
        args.devices, args.global_batch, args.memory * 1e9, args.per_host, tuple(sorted(set(args.tensor))),
        args.most_micro_batch, args.most_chunks, not args.whole_optimizer,
    )  # fmt: skip
    found = plan_layouts(measured, space)
    if isinstance(found, UnmetLayout):
        return unmet(found.binds.value, found.text, args, out)
    if args.json:
        out.json({"schema": JSON_SCHEMA, "layouts": [_document(each, space, layers) for each in found[: args.show]]})
    else:
        _tell(found, args.show, space, layers, out)
    return SOUND


def _document(found: RatedLayout, space: Space, layers: list[MeasuredLayer]) -> dict[str, Any]:
    layout = found.layout
    return {
        **{name: getattr(layout, name) for name in layout.__slots__},
        "step_s": found.step_s, "pipeline_s": found.pipeline_s, "gradients_s": found.gradients_s,
        "memory_bytes": found.memory_bytes, "parts": list(found.bounds),
        "megatron_arguments": megatron_arguments(found, space, layers), "deepspeed_json": deepspeed_json(found, space),
    }  # fmt: skip


def _tell(found: list[RatedLayout], show: int, space: Space, layers: list[MeasuredLayer], out: Output) -> None:
    rows = [
        (str(each.layout), human_ms(each.step_s), human_ms(each.gradients_s), f"{each.memory_bytes / 1e9:.3f} GB")
        for each in found[:show]
    ]
    out.table(f"the fastest of {len(found)} layouts", ("layout", "step", "of it gradients", "memory"), rows)
    best = found[0]
    out.line()
    out.line(f"Megatron: {shlex.join(megatron_arguments(best, space, layers))}")
    out.line(f"DeepSpeed: {json.dumps(deepspeed_json(best, space))}")
    if best.layout.pipeline > 1:
        out.line(f"DeepSpeed: ds_unickpt.stage_layers(layers, {list(best.bounds)})")
