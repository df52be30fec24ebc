"""``unickpt metrics``: measurements of a job for Prometheus or TensorBoard."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from unickpt.base.memory_status import read_status
from unickpt.base.prometheus import JOB_NAME
from unickpt.base.witness_notes import read_notes
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.reports.host_folders import read_hosts
from unickpt.diagnosis.reports.metrics import exposition, labelled, measurements, of_memory, of_witness, write_scalars

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Print or write the measurements."""
    hosts = read_hosts(args.directories)
    verdicts = [verdict for verdict, _ in hosts.judged(after_s=args.after)]
    memory = next((found for found in map(read_status, args.directories) if found is not None), None)
    found = [*measurements(hosts.jobs, verdicts, hosts.clock_offsets_ns), *of_memory(memory)]
    found += of_witness(read_notes(args.directories))
    measured = labelled(found, {JOB_NAME: args.job} if args.job else {})
    if args.json:
        out.json({"schema": JSON_SCHEMA, "measurements": [asdict(each) for each in measured]})
    elif args.tensorboard is None:
        out.text(exposition(measured).rstrip("\n"))
    else:
        out.line(f"{args.tensorboard}: {write_scalars(measured, args.tensorboard):,} scalars")
    return SOUND
