"""Arguments of ``unickpt plan pipeline``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from unickpt.cli.parsers.common import positive

EXAMPLE = "unickpt plan pipeline rings/host0 --stages 4"
BYTES_PER_PARAMETER = 18.0  # bf16 weight, fp32 gradient, fp32 weight and two moments


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "layers", metavar="DIR-or-FILE", type=Path, nargs="+",
        help="folders with the ring files of a job, one per host, in which timing.layers_every has left times of layers; or a "
        "JSON file with these times",
    )  # fmt: skip
    parser.add_argument("--stages", type=int, default=0, metavar="N", help="number of stages (default: one for each --device)")
    parser.add_argument(
        "--microbatches", type=positive, default=0, metavar="N", help="microbatches of a step (default: four for each stage)"
    )
    parser.add_argument(
        "--device", type=_device, action="append", default=[], metavar="NAME=SPEED,GB",
        help="device of the next stage: its speed as a multiple of the measured one, and its memory; once for each stage, or "
        "once for all with --stages",
    )  # fmt: skip
    parser.add_argument("--reorder", action="store_true", help="put unlike devices into the best order")
    parser.add_argument(
        "--bytes-per-parameter", type=float, default=BYTES_PER_PARAMETER, metavar="N",
        help="memory of a parameter with its gradient and optimizer states, on one rank (default: 18)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the plan as one JSON document")


def _device(text: str) -> tuple[str, float, float]:
    found = re.fullmatch(r"([\w.-]+)=([\d.]+)(?:,([\d.]+))?", text)
    try:
        speed, memory = (float(found[2]), float(found[3] or "inf")) if found else (0.0, 0.0)
    except ValueError:
        speed = memory = 0.0
    if found is None or not speed > 0 or not memory > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SPEED,GB with positive numbers, such as a100=1,80")
    return found[1], speed, memory * 1e9
