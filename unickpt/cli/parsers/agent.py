"""Arguments of ``unickpt agent``."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "unickpt agent /dev/shm/unickpt-1000-29500-x7k2"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder with the ring files of the ranks on this host")
    parser.add_argument(
        "--report-to",
        metavar="ADDRESS",
        help="http://... of the agent on rank 0's host (default: what DIR/agent holds); - reads it from standard input: other "
        "users of this host see command lines, and the address holds a secret",
    )
