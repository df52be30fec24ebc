"""``unickpt otlp``: send steps, calls, metrics and verdicts of a job to an OpenTelemetry collector."""

from __future__ import annotations

import argparse
import time

from unickpt.base.prometheus import JOB_NAME
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.reports.host_folders import read_hosts
from unickpt.diagnosis.reports.job_records import gather_records
from unickpt.diagnosis.reports.metrics import labelled, measurements
from unickpt.diagnosis.reports.otlp import OtlpSender, step_spans, verdict_spans
from unickpt.diagnosis.snapshot.steps import steps_of

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Send once, or again and again."""
    sender: OtlpSender | None = None
    newest: dict[int, int] = {}
    said: set[str] = set()
    while True:
        hosts = read_hosts(args.directories)
        job = gather_records(hosts.jobs, hosts.clock_offsets_ns)
        sender = sender or OtlpSender(args.to, job.name)
        judged = hosts.judged(after_s=args.after)
        fresh = [(verdict, text) for verdict, text in judged if verdict.key not in said]
        spans = sender.spans(step_spans(job, newest, calls=args.calls))
        verdicts = sender.spans(verdict_spans(job, fresh))
        values = measurements(hosts.jobs, [verdict for verdict, _ in judged], hosts.clock_offsets_ns)
        metrics = sender.metrics(labelled(values, {JOB_NAME: job.name}))
        said |= {verdict.key for verdict, _ in fresh}
        for number, rank in job.ranks.items():
            newest[number] = max([newest.get(number, -1), *steps_of(number, rank.records)["number"].tolist()])
        if args.json:
            sent = {"schema": JSON_SCHEMA, "spans": spans, "metrics": metrics, "verdicts": verdicts}
            out.json({**sent, "problems": list(job.unreadable)})
        else:
            out.line(
                f"{spans:,} spans, {metrics:,} values of metrics and {verdicts:,} verdicts of {len(job.ranks)} ranks are sent"
            )
        if not args.every or not any(rank.alive for rank in job.ranks.values()):
            return SOUND
        time.sleep(args.every)
