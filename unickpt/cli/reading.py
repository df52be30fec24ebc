"""Folders of rings, as the commands take them: one for each host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.diagnosis.clocks import clock_offsets, on_one_clock
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.verdicts import Verdict
from unickpt.diagnosis.view import view_of
from unickpt.timing.folder import Job, read_folder


@dataclass(frozen=True, slots=True)
class Hosts:
    """A job as its hosts' folders tell of it.

    Attributes:
        jobs: one for each folder.
        clock_offsets_ns: host -> what its wall clock is behind the first folder's, by the calls that they made together.
    """

    jobs: list[Job]
    clock_offsets_ns: dict[str, int]

    def judged(self, *, after_s: float | None) -> list[tuple[Verdict, str]]:
        """The verdicts on it, each with its line for a person; ``after_s`` is how long a call may take."""
        found = examine(on_one_clock([view_of(job) for job in self.jobs]), after_s=after_s)
        return list(zip(found.verdicts, found.lines, strict=True))


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the folders as an argument, ``args.directories``."""
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="where rings of the job's ranks are, a folder for each host"
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Declare how long a call may take, ``args.after``, as ``unickpt diagnose`` does."""
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="how long a call may take (default: by what the job's own have taken)"
    )


def read_hosts(folders: Sequence[Path]) -> Hosts:
    """All records of all folders.

    Raises:
        NotACheckpointError: there is no ring in one of them.
    """
    jobs = [read_folder(folder) for folder in folders]
    offsets = clock_offsets([view_of(job) for job in jobs]) if len(jobs) > 1 else []
    found: dict[str, int] = {}
    for job, offset in zip(jobs, offsets, strict=False):
        for ring in job.ranks.values():
            found.setdefault(ring.identity.host, offset.ns)
    return Hosts(jobs, found)
