"""Folders of ring files as command-line arguments, one per host."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the folders as an argument, ``args.directories``."""
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="folders with the ring files of the job, one per host"
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Declare the time limit of a call, ``args.after``."""
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="time limit of a call (default: derived from the calls of the job)"
    )
