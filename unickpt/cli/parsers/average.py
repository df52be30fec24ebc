"""Arguments of ``unickpt average``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_json, add_writing

EXAMPLE = "unickpt average runs/mean runs/a --last 4"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("destination", metavar="DST", help="output directory; an interrupted average into it goes on")
    parser.add_argument(
        "sources", metavar="SRC", nargs="+", help="checkpoints in order, or one save directory with --last; paths or URLs"
    )
    parser.add_argument("--last", type=int, metavar="K", help="average the K newest complete checkpoints of the save directory")
    parser.add_argument(
        "--ema", type=float, metavar="DECAY", help="exponential moving average: m = DECAY * m + (1 - DECAY) * x, in order"
    )
    add_writing(parser)
    add_json(parser)
