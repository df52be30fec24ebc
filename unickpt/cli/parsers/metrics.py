"""Arguments of ``unickpt metrics``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import add_deadline, add_folders

EXAMPLE = "unickpt metrics rings/host0"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    add_deadline(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--tensorboard", type=Path, metavar="LOGDIR", help="write TensorBoard scalars to this directory instead of printing"
    )
    form.add_argument("--json", action="store_true", help="the measurements as one JSON document")
    parser.add_argument("--job", default="", metavar="NAME", help="add the label job_name, which metrics of a running job have")
