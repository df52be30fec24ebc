"""Arguments of ``unickpt plan ranks``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import steps

EXAMPLE = "unickpt plan ranks rings/host0 rings/host1 --hostfile"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("places", metavar="DIR", nargs="+", help="folders with the ring files of a job, one per host")
    parser.add_argument("--steps", type=steps, metavar="A:B", help="first and last step (default: the newest 20 steps)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--hostfile", action="store_true", help="print only a host file, for DeepSpeed's launcher and MPI")
    form.add_argument("--rankfile", action="store_true", help="print only a rank file, for Open MPI")
    form.add_argument("--json", action="store_true", help="the plan as one JSON document")
