"""``unickpt report``: write an HTML report of a job."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.base.memory_status import read_status
from unickpt.base.witness_notes import read_notes
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.diagnosis.reports.host_folders import read_hosts
from unickpt.diagnosis.reports.html_report import contents, memory_section, write_report
from unickpt.diagnosis.reports.job_records import gather_records
from unickpt.planning.replay.price import analyse
from unickpt.planning.replay.sources import trace_of_records
from unickpt.steering.publishing.chronicle import is_history, read_history
from unickpt.steering.state.history import merged
from unickpt.steering.state.timeline import JobTimes, as_json, job_times

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Write the report. The exit code does not depend on the verdicts; ``unickpt diagnose`` returns them."""
    histories = [folder for folder in args.directories if is_history(folder)]
    folders = [folder for folder in args.directories if folder not in histories]
    hosts = read_hosts(folders)
    view = gather_records(hosts.jobs, hosts.clock_offsets_ns)
    verdicts = hosts.judged(after_s=args.after) if folders else []
    times, problems = _times(histories)
    memory = next((found for found in map(read_status, folders) if found is not None), None)
    section = memory_section(memory, view.read_ns / 1e9)
    prices = None
    if args.prices and folders:
        try:
            prices = analyse(trace_of_records(view, clock_error_ns=hosts.clock_error_ns)).for_report()
        except FormatError as err:
            problems.append(f"no prices: {err}")
    notes = read_notes(folders)
    write_report(contents(view, verdicts, None if times is None else as_json(times), section, prices, notes), args.output)
    if args.json:
        told = [{**verdict.as_json(), **text.as_json()} for verdict, text in verdicts]
        file = {"output": str(args.output), "size_bytes": args.output.stat().st_size}
        read = {"ranks": len(view.ranks), "world": view.world, "problems": [*view.unreadable, *problems]}
        out.json(
            {
                "schema": JSON_SCHEMA,
                **file,
                **read,
                "verdicts": told,
                "witness": [asdict(each) for each in notes],
                "times": None if times is None else as_json(times),
            }
        )
        return SOUND
    for problem in [*view.unreadable, *problems]:
        out.line(problem, style="yellow")
    for each in notes:
        out.line(f"witness: {each.text}", style="red")
    for _, text in verdicts:
        out.line(text.line)
        out.line(text.sentence, style="red")
    if times is not None:
        _tell(times, out)
    ranks = f"{len(view.ranks)} of {view.world} ranks, " if folders else ""
    out.line(f"{args.output}: {ranks}{human_bytes(args.output.stat().st_size)}")
    return SOUND


def _times(folders: list[Path]) -> tuple[JobTimes | None, list[str]]:
    """Return the times of the job, None without a history, and what could not be read."""
    read = [read_history(folder) for folder in folders]
    problems = [problem for _, found in read for problem in found]
    return (job_times(merged(file for files, _ in read for file in files)) if read else None), problems


def _tell(times: JobTimes, out: Output) -> None:
    steps = "" if times.steps_known else " (the job is not timed, so only the time between rounds counts as downtime)"
    out.line(
        f"effective training time {times.effective:.2%}: {times.training_s:,.1f} s of {times.wall_s:,.1f} s, "
        f"{len(times.rounds)} rounds{steps}"
    )
    for cause, (count, seconds) in times.by_cause().items():
        out.line(f"  {seconds:,.1f} s in {count} x {cause or 'the round that runs'}")
