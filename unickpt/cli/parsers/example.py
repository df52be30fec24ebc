"""Arguments of ``unickpt example``."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "unickpt example zero2.json --to ."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="example to print; default: list all")
    parser.add_argument("--to", metavar="DIR", type=Path, help="write the example into this folder; no file is replaced")
