"""``unickpt diagnose``: find hanging and slow ranks and links, from ring files or from the job's agent."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.base.private_files import SHARED_MEMORY, read_text
from unickpt.base.witness_notes import read_notes
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.agent.launch import ADDRESS, read_address
from unickpt.diagnosis.agent.server import fetch
from unickpt.diagnosis.agent.telling import VERDICTS
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.places import MOST
from unickpt.diagnosis.detectors.verdicts import Reach, Verdict
from unickpt.diagnosis.hardware.kept import kept
from unickpt.diagnosis.host.process_exits import read_exits
from unickpt.diagnosis.recording.ring_folder import described, has_living, own_jobs, read_folder
from unickpt.diagnosis.reports.host_folders import placed
from unickpt.diagnosis.reports.verdict_text import as_json, pending, render_all, render_waits
from unickpt.diagnosis.reports.wording import clock_time
from unickpt.diagnosis.snapshot.clocks import on_one_clock
from unickpt.diagnosis.snapshot.snapshot import KEPT_STEPS, Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.stacks import with_stacks

JSON_SCHEMA = 2
_TOLD = ("line", "sentence", "next_text", "command", "since")
_MOST_BYTES, _MOST_BEFORE = 4 << 20, 16  # of verdicts.jsonl; earlier verdicts that are shown


def seen_from(places: Sequence[str]) -> Snapshot:
    """Read the state of a job from the ring files of its hosts or from its agent.

    Raises:
        NotACheckpointError: a folder has no ring files.
        FormatError: no agent answers at an address.
    """
    return on_one_clock([_seen_from(place) for place in places])


def _seen_from(place: str) -> Snapshot:
    if "://" not in place and Path(place).name == ADDRESS and Path(place).is_file():
        place = read_address(Path(place).parent)
    if "://" not in place:
        job, exits = read_folder(Path(place)), read_exits(Path(place))
        return take_snapshot(job, exits=exits, newest_steps=KEPT_STEPS, hardware=kept(Path(place)))
    try:
        return fetch(place)
    except OSError as err:
        raise FormatError(
            f"{place}: no agent answers there ({err}). The address is in DIR/agent on the host of rank 0"
        ) from err


def own_folder() -> tuple[str, str]:
    """Return the folder of this user's newest job on this host, and what was chosen, for a person; '' if there is no choice.

    Of a running job that is the folder of its newest round.

    Raises:
        NotACheckpointError: there is no such folder, or several jobs run.
    """
    found = own_jobs(SHARED_MEMORY)
    if not found:
        raise NotACheckpointError(
            f"{SHARED_MEMORY}: no job of yours is timed here. For the next run set UNICKPT_TIMING=1 or timing.enabled; for "
            "this one, py-spy dump --pid PID shows where a process is. If the rings are elsewhere, pass their folder"
        )
    running = [folder for folder in found if has_living(folder)]  # of earlier rounds, no process lives
    if len(running) > 1:
        lines = [f"  unickpt diagnose {folder}  # {described(folder)}" for folder in running]
        raise NotACheckpointError(
            "\n".join(("several of your jobs are timed here, all of them running; name one (newest last):", *lines))
        )
    folder = next(iter(running), found[-1])
    if len(found) == 1:
        return str(folder), ""
    which = "the newest round of the running job" if running else "the job that has ended last"
    return str(folder), f"{folder}: {which}, of {len(found)} folders: {described(folder)}"


def _told_before(folders: Sequence[Path], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return what the agent has written to the log, without what is still so, the newest last."""
    now = {(verdict.syndrome.value, verdict.ranks) for verdict in verdicts}
    found: dict[str, dict[str, Any]] = {}  # a lasting verdict is told again and again, with one line
    for folder in folders:
        for line in read_text(folder / VERDICTS, _MOST_BYTES).splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                entry = json.loads(line)
                if (str(entry["syndrome"]), tuple(entry["ranks"])) not in now:
                    told = {name: entry.get(name, "") for name in _TOLD}
                    found.setdefault(str(entry["line"]), {"at_ns": int(entry["at_ns"]), **told})
    return sorted(found.values(), key=lambda entry: int(entry["at_ns"]))[-_MOST_BEFORE:]


def run(args: argparse.Namespace, out: Output) -> int:
    """Read and print; 0 if nothing is wrong, 1 if something is, or if the witness has found something in this round."""
    own, chosen = ("", "") if args.places else own_folder()
    places = args.places or [own]
    snapshot = seen_from(places)
    found = examine(snapshot, after_s=args.after, reach=Reach(tuple(places))).with_end()
    folders = [Path(place) for place in places if Path(place).is_dir()]
    verdicts, snapshot = placed(found.verdicts, snapshot, folders)
    texts = render_all(verdicts, snapshot)
    before, notes = _told_before(folders, verdicts), read_notes(folders)
    if args.json:
        state = {"schema": JSON_SCHEMA, "ranks": len(snapshot.ranks), "deadline_s": found.deadline_s, "places": list(places)}
        told = {
            "verdicts": as_json(verdicts, texts),
            "told_before": before,
            "witness": [asdict(each) for each in notes],
            "problems": snapshot.problems,
        }
        out.json({**state, **told})
    else:
        if chosen:
            out.line(chosen)
        for problem in snapshot.problems:
            out.line(problem, style="yellow")
        for each in notes:
            out.line(f"witness: {each.text}", style="red")
            out.line(f"next: {each.next}", style="bold")
        for text in texts:
            out.line(text.line)
            out.line(text.sentence, style="red")
            if text.next:
                out.line(f"next: {text.next}", style="bold")
        if not texts:
            out.line(f"{len(snapshot.ranks)} ranks: no rank waits longer than {found.deadline_s:g} s, and no rank is slow.")
            asked = {rank for call in pending(snapshot) for rank in (*call.waiters[:MOST], *call.missing[:MOST])}
            for line in render_waits(with_stacks(snapshot, folders, asked)):
                out.line(line)
        for entry in before:
            out.line(f"told at {clock_time(int(entry['at_ns']))}: {entry['line']}")
            out.line(str(entry["sentence"]), style="yellow")
            if entry["next_text"]:
                out.line(f"next: {entry['next_text']}")
    return DAMAGED if found.verdicts or notes else SOUND
