"""Arguments that several commands have, and their types."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unickpt.base.private_files import SHARED_MEMORY

T = TypeVar("T")


def written_as(pattern: str, otherwise: str, value: Callable[[str], T | None]) -> Callable[[str], T]:
    """Return the type of an argument that is written in a certain way.

    Args:
        pattern: regular expression of the whole text.
        otherwise: what the error says of another text, after it.
        value: returns the value of a text that matches; None if it is out of bounds.
    """

    def parsed(text: str) -> T:
        found = value(text) if re.fullmatch(pattern, text) else None
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} {otherwise}")
        return found

    return parsed


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as ``0,2,1``, ``3-7`` or ``100:119``."""
    return tuple(map(int, re.split("[,:-]", text)))


def _ascending(text: str) -> tuple[int, ...] | None:
    first, last = numbers(text)
    return (first, last) if first <= last else None


positive = written_as(r"[1-9]\d{0,8}", "is not a number from 1", int)
steps = written_as(r"\d+:\d+", "is not FIRST:LAST, such as 100:119", _ascending)


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the folders of ring files as an argument, ``args.directories``."""
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="folders with the ring files of the job, one per host"
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Declare the time limit of a call, ``args.after``."""
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="time limit of a call (default: derived from the calls of the job)"
    )


def add_memory_folder(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of checkpoints in memory, ``args.memory_folder``."""
    parser.add_argument(
        "--memory-folder",
        metavar="DIR",
        type=Path,
        default=SHARED_MEMORY,
        help="directory in memory that holds checkpoints, as the option memory.folder (default: /dev/shm)",
    )
