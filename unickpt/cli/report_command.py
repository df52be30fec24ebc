"""``unickpt report``: a job's records as pictures on one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.reading import add_deadline, add_folders, read_hosts
from unickpt.views.gathering import gathered
from unickpt.views.report import write_report


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    add_deadline(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read and write; 0 whatever is seen there (``unickpt diagnose`` judges)."""
    hosts = read_hosts(args.directories)
    view, verdicts = gathered(hosts.jobs, hosts.clock_offsets_ns), hosts.judged(after_s=args.after)
    write_report(view, verdicts, args.output)
    for problem in view.unreadable:
        out.line(problem, style="yellow")
    for _, line in verdicts:
        out.line(line, style="red")
    out.line(f"{args.output}: {len(view.ranks)} of {view.world} ranks, {human_bytes(args.output.stat().st_size)}")
    return SOUND
