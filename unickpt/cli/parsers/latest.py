"""Arguments of ``unickpt latest``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt latest runs/a"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a save directory, the output directory of a Trainer run (checkpoint-*), or a checkpoint; a path or a URL",
    )
    parser.add_argument(
        "--witnessed",
        action="store_true",
        help="the newest one that is not after the last step that the witness has passed",
    )
    parser.add_argument("--json", action="store_true", help="path, checkpoint and step as one JSON document")
