"""Arguments of ``unickpt verify``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt verify runs/a/global_step500"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory", metavar="DIR", help="a checkpoint, or a save directory (follows 'latest'); a path or a URL"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
