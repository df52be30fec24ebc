"""``unickpt plan bits``: the bits of each weight with the least predicted error under a limit of memory."""

from __future__ import annotations

import argparse
from typing import Any

from unickpt.api.planning import BitsRequest, planned_bits
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.export_command import model_folder, settings_of
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar, write_json
from unickpt.cli.parsers.export import DTYPES
from unickpt.cli.plan_command import unmet
from unickpt.planning.plan.partition import Device, Unmet
from unickpt.transform.convert.huggingface.writer import as_huggingface
from unickpt.transform.quantise.scheme import Scheme

_SHOWN = 40  # rows of the table of layers


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan, print, and write the plan."""
    if (args.memory is None) == (not args.device):
        raise ConfigError("name the memory with --memory GB, or each device of a pipeline with --device NAME=GB")
    directory = locate_checkpoint(args.directory)
    config = settings_of(model_folder(args.config, directory))
    checkpoint = as_huggingface(Checkpoint.open(directory), chosen=args.dialect, config=config)
    given = args.device or [("device", args.memory)]
    devices = [Device(name, memory_bytes=memory) for name, memory in given]
    dtype = torch_dtype(DTYPES[args.dtype]) if args.dtype else None
    request = BitsRequest(devices, args.reorder, args.choices, args.indicator, args.inputs, args.tokens, dtype, args.errors)
    total = sum(info.size_bytes for info in checkpoint.index.tensors if info.state == "weight")
    with progress_bar("measure", total) as advance:
        found = planned_bits(checkpoint, request, config, advance)
    if isinstance(found, Unmet):
        return unmet(found.binds.value, str(found), args, out)
    if args.out is not None:
        write_json(args.out, found)
    if args.json:
        out.json(found)
    else:
        _tell(found, out)
    return SOUND


def _tell(plan: dict[str, Any], out: Output) -> None:
    out.line(f"{human_bytes(plan['total_bytes'])}; predicted error {plan['error']:.4g} ({plan['indicator']})", style="bold")
    if not plan["exact"]:
        out.line("sizes are rounded up to steps of memory: a slightly better plan may exist")
    values: dict[str, int] = {}
    for unit in plan["units"]:
        name = str(Scheme(unit["bits"], unit["group"] or 0))
        values[name] = values.get(name, 0) + unit["values"]
    whole = sum(values.values())
    out.table(
        "bits", ("bits/group", "values", "share"), [(n, count, f"{count / whole:.1%}") for n, count in sorted(values.items())]
    )
    if len(plan["devices"]) > 1:
        stages = [
            (d["device"], f"{d['first_layer']} to {d['last_layer']}", d["bytes"], int(d["memory_bytes"]), f"{d['error']:.4g}")
            for d in plan["devices"]
        ]
        out.table("devices", ("device", "layers", "bytes", "memory", "predicted error"), stages)
    schemes: dict[int, list[str]] = {}
    for unit in plan["units"]:
        last = unit["unit"].rpartition(".")[2]
        schemes.setdefault(unit["layer"], []).append(f"{last} {Scheme(unit['bits'], unit['group'] or 0)}")
    rows = [
        (str(n["layer"]), f"{n['mean_bits']:.1f}", n["bytes"], f"{n['error']:.4g}", ", ".join(schemes.get(n["layer"], [])))
        for n in plan["layers"][:_SHOWN]
    ]
    out.table("layers", ("layer", "bits", "bytes", "predicted error", "units"), rows)
    if len(plan["layers"]) > _SHOWN:
        out.line(f"and {len(plan['layers']) - _SHOWN:,} more: --json has all of them")
    for name, value in plan["vllm_environment"].items():
        out.line(f"vLLM: {name}={value}")
