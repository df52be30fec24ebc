"""Folders of rings, as the commands take them: one for each host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.verdicts import Verdict
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


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Declare how long a call may take, ``args.after``, as ``unickpt diagnose`` does."""
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="how long a call may take (default: by what the job's own have taken)"
    )


def judged(jobs: Sequence[Job], *, after_s: float | None) -> list[tuple[Verdict, str]]:
    """The verdicts on a job, each with its line for a person; ``after_s`` is how long a call may take."""
    together = Job(
        {rank: ring for job in jobs for rank, ring in job.ranks.items()},
        {rank: state for job in jobs for rank, state in job.states.items()},
        tuple(problem for job in jobs for problem in job.unreadable),
        max(job.now_ns for job in jobs),
    )
    found = examine(together, after_s=after_s)
    return list(zip(found.verdicts, found.lines, strict=True))
