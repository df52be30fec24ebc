"""Arguments of ``unickpt hosts``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import add_memory_folder

EXAMPLE = "unickpt hosts park node-7"
PARK, ADMIT, END = "park", "admit", "end"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=(PARK, ADMIT, END),
        help="park: the host is out until it is admitted; admit: it may take part again; end: the whole job ends in order, as "
        "by SIGTERM to every agent (default: show all hosts)",
    )
    parser.add_argument("host", metavar="HOST", nargs="?", help="name of the host, as in the table")
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        default="",
        help="as given to torchrun, or the address of any agent (default: the agent on this host)",
    )
    parser.add_argument("--rdzv-id", metavar="ID", default="", help="as given to torchrun; needed with --rdzv-endpoint")
    parser.add_argument("--secret-file", metavar="FILE", type=Path, help="as given to torchrun by --rdzv-conf secret_file=FILE")
    add_memory_folder(parser)
    parser.add_argument("--json", action="store_true", help="the hosts, or the order, as one JSON document")
