"""``unickpt metrics``: measurements of a job, as Prometheus reads them or as TensorBoard's scalars."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.cli.reading import add_deadline, add_folders, read_hosts
from unickpt.views.metrics import exposition, measurements, write_scalars


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_folders(parser)
    add_deadline(parser)
    parser.add_argument(
        "--tensorboard", type=Path, metavar="LOGDIR", help="write scalars by step there, and print nothing for Prometheus"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Read, and print or write; 0 if that is done."""
    hosts = read_hosts(args.directories)
    verdicts = [verdict for verdict, _ in hosts.judged(after_s=args.after)]
    measured = measurements(hosts.jobs, verdicts, hosts.clock_offsets_ns)
    if args.tensorboard is None:
        out.text(exposition(measured).rstrip("\n"))
    else:
        out.line(f"{args.tensorboard}: {write_scalars(measured, args.tensorboard):,} scalars")
    return SOUND
