"""Arguments of ``unickpt doctor``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt doctor /mnt/runs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "place",
        metavar="FOLDER",
        nargs="?",
        help="folder or URL for checkpoints: whether a small file can be written there, and how",
    )
    parser.add_argument("--json", action="store_true", help="the facts as one JSON document")
