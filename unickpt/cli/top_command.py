"""``unickpt top``: a job, live in a terminal: verdicts, hosts, who waits for whom, ranks, checkpoints in memory."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.base.memory_status import MemoryStatus, read_status
from unickpt.base.witness_notes import read_notes
from unickpt.cli.diagnose_command import own_folder, seen_from
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.agent.launch import ADDRESS
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.verdicts import Reach
from unickpt.diagnosis.reports.top_view import TopView, top_view
from unickpt.diagnosis.reports.verdict_text import render_all

_HOME = "\x1b[H\x1b[2J\x1b[3J"  # of a terminal: clear it


def run(args: argparse.Namespace, out: Output) -> int:
    """Look again and again, until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            view = seen(args.places, args.after)
            if args.once or not sys.stdout.isatty():
                show(view, out)
                return SOUND
            drawn = io.StringIO()
            show(view, Output(drawn))
            out.text(_HOME + drawn.getvalue())
            time.sleep(max(args.every, 0.2))
    return SOUND


def seen(given: list[str], after_s: float | None) -> TopView:
    """Look once: at the whole job through its agent, if that answers, otherwise at the rings of this host.

    Raises:
        NotACheckpointError: there is no such job.
        FormatError: no agent answers at an address.
    """
    places = given or [own_folder()[0]]
    folder = Path(places[0])
    snapshot = None
    if len(places) == 1 and (folder / ADDRESS).is_file():
        with contextlib.suppress(FormatError):
            snapshot = seen_from([str(folder / ADDRESS)])
    snapshot = snapshot or seen_from(places)
    found = examine(snapshot, after_s=after_s, reach=Reach(tuple(places))).with_end()
    memory: MemoryStatus | None = read_status(folder) if folder.is_dir() else None
    notes = read_notes([Path(place) for place in places if Path(place).is_dir()])
    return top_view(snapshot, found.verdicts, render_all(found.verdicts, snapshot), memory, notes)


def show(view: TopView, out: Output) -> None:
    """Print what is shown."""
    out.line(view.head, style="bold")
    for line in view.verdicts:
        out.line(line, style="red")
    out.table("hosts", ["host", "ranks", "step", "states", "hardware"], view.hosts)
    if view.waits:
        out.line()
    for line in view.waits:
        out.line(line, style="yellow")
    if view.ranks:
        out.table("ranks", ["rank", "host", "step", "phase", "state", "last call that ended"], view.ranks)
    if view.folded:
        out.line(view.folded)
    if view.memory:
        out.line(view.memory)
