"""Arguments of ``unickpt trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import add_folders, add_json

EXAMPLE = "unickpt trace rings/host0 rings/host1 -o trace.json.gz"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="trace.json, or trace.json.gz to compress it"
    )
    add_json(parser)
