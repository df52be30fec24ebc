"""Arguments of ``unickpt inspect``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_memory_folder

EXAMPLE = "unickpt inspect runs/a --grep 'layers.0.*mlp'"
SHOWN_PARAMETERS = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a checkpoint, a save directory (follows 'latest'), or the output directory of a Trainer run; a path or a URL. "
        "A checkpoint in memory: memory://TOKEN/gNUMBER as in the log and in 'unickpt hosts', or its folder in /dev/shm; "
        "without gNUMBER the newest that can be loaded. Or a model folder with rounded weights ('export --to vllm')",
    )
    add_memory_folder(parser)
    parser.add_argument("--all", action="store_true", help=f"list all parameters, not only the first {SHOWN_PARAMETERS}")
    parser.add_argument("--grep", metavar="REGEX", help="only parameters whose name contains a match")
    parser.add_argument("--objects", action="store_true", help="show the non-tensor state in full")
    parser.add_argument("--tensor", metavar="NAME", help="show the fragments of one tensor instead")
    parser.add_argument("--state", metavar="STATE", help="with --tensor: one state of it (weight, master, exp_avg, ...)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON document")
