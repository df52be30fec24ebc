"""Arguments that several commands have, their types, and what ``--help`` of every command has."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from unickpt.base.private_files import SHARED_MEMORY

T = TypeVar("T")


def add_command(commands: argparse._SubParsersAction[Any], name: str, help_text: str, arguments: str = "") -> None:
    """Declare a subcommand.

    Args:
        commands: where it is declared.
        name, help_text: of the command.
        arguments: module with its ``configure(parser)`` and its ``EXAMPLE``; '' for a command that is not called.
    """
    parser = commands.add_parser(name, help=help_text)
    if arguments:
        module = import_module(arguments)
        about = f"{help_text[:1].upper()}{help_text[1:]}."
        parser.description = textwrap.fill(about, max(shutil.get_terminal_size().columns - 2, 20))
        parser.epilog = f"example:\n  {module.EXAMPLE}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter  # it would break a command at its hyphens
        module.configure(parser)


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


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare that the result can be printed for programs, ``args.json``. Progress stays on standard error."""
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``edit`` and ``average`` have in common."""
    parser.add_argument("--dry-run", action="store_true", help="print the tensors of the result; write nothing")
    parser.add_argument("--no-verify", action="store_true", help="do not check the sources against their checksums first")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of files at a time (default: 2)")
