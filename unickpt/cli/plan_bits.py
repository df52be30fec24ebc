"""``unickpt plan bits``: the bits of each weight with the least predicted error under a limit of memory."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from unickpt.api.planning import SCHEMES, BitsRequest, planned_bits
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.arguments import written_as
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.export_command import DTYPES, model_folder, settings_of
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar, write_json
from unickpt.cli.plan_command import unmet
from unickpt.planning.plan.partition import Device, Unmet
from unickpt.transform.convert.huggingface.writer import as_huggingface
from unickpt.transform.quantise.measure import INDICATORS
from unickpt.transform.quantise.scheme import Scheme

_SHOWN = 40  # rows of the table of layers


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="a checkpoint, a save directory, or checkpoint-500 of a Trainer run")
    parser.add_argument("--memory", type=_gigabytes, metavar="GB", help="memory of one device for weights and cache, in GB")
    parser.add_argument(
        "--device", type=_device, action="append", default=[], metavar="NAME=GB",
        help="device of the next stage of a pipeline, and its memory; once for each stage",
    )  # fmt: skip
    parser.add_argument("--reorder", action="store_true", help="put unlike devices into the best order")
    parser.add_argument(
        "--choices", type=_choices, default=_choices(",".join(SCHEMES)), metavar="BITS,BITS,...",
        help="schemes to choose from, as for 'export --bits', such as 4,4/32,8,16 (default: 4,8,16)",
    )  # fmt: skip
    parser.add_argument(
        "--indicator",
        choices=("auto", *INDICATORS),
        default="auto",
        help="predicted error of a weight. second-moment: the optimizer's squared gradients times the squared change. "
        "weight-error: the squared change. variance: LLM-PQ's. auto (default): the first if the checkpoint has it, otherwise "
        "the second",
    )
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="statistics of unickpt.InputStatistics, for the last two")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="errors of unickpt.measure_rounding, instead of an indicator"
    )
    parser.add_argument(
        "--tokens", type=_count, default=0, metavar="N", help="tokens whose keys and values are in memory at once (default: 0)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FOLDER", help="folder with the config.json of the model, as for 'export'"
    )
    parser.add_argument("--dialect", default="", metavar="FAMILY", help="family of the model, as for 'export'")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of what is not rounded, as for 'export --to vllm'")
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help="write the plan for 'export --to vllm --bits PLAN.json'")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON document")


_gigabytes = written_as(
    r"\d+(\.\d+)?", "is not a number of GB above 0", lambda text: round(float(text) * 1e9) if float(text) > 0 else None
)
_count = written_as(r"\d{1,12}", "is not a number", int)


def _device(text: str) -> Device:
    name, _, memory = text.rpartition("=")
    if not re.fullmatch(r"[\w.-]+", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GB, such as a100=80")
    return Device(name, memory_bytes=_gigabytes(memory))


def _choices(text: str) -> list[Scheme]:
    try:
        return [Scheme.parse(part) for part in text.split(",")]
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from None


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan, print, and write the plan."""
    if (args.memory is None) == (not args.device):
        raise ConfigError("name the memory with --memory GB, or each device of a pipeline with --device NAME=GB")
    directory = locate_checkpoint(args.directory)
    config = settings_of(model_folder(args.config, directory))
    checkpoint = as_huggingface(Checkpoint.open(directory), chosen=args.dialect, config=config)
    devices = args.device or [Device("device", memory_bytes=args.memory)]
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
