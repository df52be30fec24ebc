"""Arguments of ``unickpt watch``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt watch -- torchrun --nproc-per-node 8 train.py"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="program to run, with its arguments; -- may stand before it",
    )
