"""``unickpt diagnose``: what a job's ranks wait for, from their rings on this host."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.examining import examine
from unickpt.timing.folder import read_folder

JSON_SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the rings of the job's ranks are")
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="how long a call may take (default: by what the job's own have taken)"
    )
    parser.add_argument("--json", action="store_true", help="the verdicts as one JSON document")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read and print; 0 if nothing is wrong, 1 if something is."""
    job = read_folder(args.directory)
    found = examine(job, after_s=args.after)
    if args.json:
        verdicts = [
            {**dataclasses.asdict(verdict), "syndrome": verdict.syndrome.value, "told": line}
            for verdict, line in zip(found.verdicts, found.lines, strict=True)
        ]
        document = {"schema": JSON_SCHEMA, "ranks": len(job.ranks), "deadline_s": found.deadline_s, "verdicts": verdicts}
        out.json({**document, "unreadable": job.unreadable})
    else:
        for problem in job.unreadable:
            out.line(problem, style="yellow")
        for line in found.lines:
            out.line(line, style="red")
        if not found.lines:
            out.line(f"{len(job.ranks)} ranks: nobody waits for longer than {found.deadline_s:g} s, and nobody drags.")
    return DAMAGED if found.verdicts else SOUND
