"""``unickpt trace``: write the records of a job as a Perfetto trace."""

from __future__ import annotations

import argparse

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.diagnosis.reports.host_folders import read_hosts
from unickpt.diagnosis.reports.job_records import gather_records
from unickpt.diagnosis.reports.perfetto import write_trace

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Write the trace."""
    hosts = read_hosts(args.directories)
    view = gather_records(hosts.jobs, hosts.clock_offsets_ns)
    written = write_trace(view, args.output)
    if args.json:
        told = {"output": str(args.output), "size_bytes": args.output.stat().st_size, "events": written}
        out.json({"schema": JSON_SCHEMA, **told, "ranks": len(view.ranks), "problems": list(view.unreadable)})
        return SOUND
    for problem in view.unreadable:
        out.line(problem, style="yellow")
    size = human_bytes(args.output.stat().st_size)
    out.line(f"{args.output}: {written:,} events of {len(view.ranks)} ranks, {size}; open it at ui.perfetto.dev")
    return SOUND
