"""Arguments of ``unickpt upcycle``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_writing
from unickpt.cli.parsers.grow import configure_model

EXAMPLE = "unickpt upcycle runs/dense runs/moe --experts 8 --top-k 2"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_model(parser)
    parser.add_argument("--experts", type=int, required=True, metavar="E", help="number of experts of a layer")
    parser.add_argument("--top-k", type=int, required=True, metavar="K", help="experts of a token, a multiple of --granularity")
    parser.add_argument("--granularity", type=int, default=1, metavar="G", help="divide each block into G experts (default: 1)")
    add_writing(parser)
