"""Arguments of ``unickpt plan parallel``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import positive

EXAMPLE = "unickpt plan parallel rings/host0 --devices 48 --global-batch 192"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "places",
        metavar="DIR",
        nargs="+",
        help="folders with the ring files of a job, one per host, in which timing.layers_every has left times of layers",
    )
    parser.add_argument("--devices", type=positive, required=True, metavar="N", help="number of devices of the next run")
    parser.add_argument("--global-batch", type=positive, required=True, metavar="ROWS", help="rows of a step, on all devices")
    parser.add_argument(
        "--micro-batch", type=positive, default=1, metavar="ROWS", help="rows of a microbatch of the measured job (default: 1)"
    )
    parser.add_argument("--memory", type=float, default=float("inf"), metavar="GB", help="memory of a device (default: any)")
    parser.add_argument("--per-host", type=positive, default=8, metavar="N", help="devices of a host (default: 8)")
    parser.add_argument(
        "--tensor", type=positive, action="append", default=[], metavar="N",
        help="allowed tensor parallel size; may be repeated (default: powers of two up to --per-host)",
    )  # fmt: skip
    parser.add_argument("--most-micro-batch", type=positive, default=64, metavar="N", help="largest microbatch (default: 64)")
    parser.add_argument("--most-chunks", type=positive, default=4, metavar="N", help="most chunks of a stage (default: 4)")
    parser.add_argument(
        "--whole-optimizer", action="store_true", help="each data parallel rank has all optimizer states (no ZeRO)"
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="file with the layers of earlier jobs, to which this one is added (default: in the cache folder of the user)",
    )
    parser.add_argument("--show", type=positive, default=10, metavar="N", help="layouts to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON document")
