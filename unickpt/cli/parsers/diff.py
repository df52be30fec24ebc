"""Arguments of ``unickpt diff``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt diff runs/a/global_step500 runs/b/global_step500"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("first", metavar="A", help="a checkpoint, or a save directory (follows 'latest'); a path or a URL")
    parser.add_argument(
        "second", metavar="B", help="another one; if another framework wrote it, it is read under the names of the first"
    )
    parser.add_argument(
        "--dialect",
        default="",
        metavar="FAMILY",
        help="family of the model, if neither checkpoint tells it, or file of a dialect",
    )
    parser.add_argument("--all", action="store_true", help="also list equal tensors")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
