"""Arguments of ``unickpt top``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_deadline

EXAMPLE = "unickpt top"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "places",
        metavar="DIR-or-ADDRESS",
        nargs="*",
        help="as for diagnose (default: your running job on this host, as a whole)",
    )
    add_deadline(parser)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="look once, and print")
