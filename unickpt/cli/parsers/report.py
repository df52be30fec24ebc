"""Arguments of ``unickpt report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import add_deadline, add_json

EXAMPLE = "unickpt report rings/host0 rings/host1 -o report.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+",
        help="folders with the ring files of the job, one per host, and folders with its history (torchrun's agents log them)",
    )  # fmt: skip
    add_deadline(parser)
    parser.add_argument(
        "--prices", action="store_true", help="add what each rank, link, stage and cause costs of a step (unickpt whatif)"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    add_json(parser)
