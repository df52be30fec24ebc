"""``unickpt report``: write an HTML report of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.ring_folders import add_deadline, add_folders, read_hosts
from unickpt.diagnosis.reports.html_report import write_report
from unickpt.diagnosis.reports.job_records import gather_records


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    add_deadline(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(args: argparse.Namespace, out: Output) -> int:
    """Write the report. The exit code does not depend on the verdicts; ``unickpt diagnose`` returns them."""
    hosts = read_hosts(args.directories)
    view, verdicts = gather_records(hosts.jobs, hosts.clock_offsets_ns), hosts.judged(after_s=args.after)
    write_report(view, verdicts, args.output)
    for problem in view.unreadable:
        out.line(problem, style="yellow")
    for _, text in verdicts:
        out.line(text.line)
        out.line(text.sentence, style="red")
    out.line(f"{args.output}: {len(view.ranks)} of {view.world} ranks, {human_bytes(args.output.stat().st_size)}")
    return SOUND
