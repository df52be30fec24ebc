"""Folders of rings, as the commands take them: one for each host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from unickpt.diagnosis.clocks import on_one_clock
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.verdicts import Verdict
from unickpt.diagnosis.view import view_of
from unickpt.timing.folder import Job, read_folder


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the folders as an argument, ``args.directories``."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="where the rings of the job's ranks are; a folder for each host",
    )


def read_jobs(folders: Sequence[Path]) -> list[Job]:
    """All records of all folders.

    Raises:
        NotACheckpointError: there is no ring in one of them.
    """
    return [read_folder(folder) for folder in folders]


def judged(jobs: Sequence[Job]) -> list[tuple[Verdict, str]]:
    """The verdicts on a job, each with its line for a person."""
    found = examine(on_one_clock([view_of(job) for job in jobs]))
    return list(zip(found.verdicts, found.lines, strict=True))
