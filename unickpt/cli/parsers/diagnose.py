"""Arguments of ``unickpt diagnose``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_deadline

EXAMPLE = "unickpt diagnose /dev/shm/unickpt-1000-*"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "places",
        metavar="DIR-or-ADDRESS",
        nargs="*",
        help="folders with the ring files of a job, one per host; or http://... of the job's agent, or "
        "DIR/agent, the file with that address (default: the one folder of your jobs in the shared memory of this host)",
    )
    add_deadline(parser)
    parser.add_argument("--json", action="store_true", help="the verdicts as one JSON document")
