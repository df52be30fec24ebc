"""``unickpt diagnose``: what a job's ranks wait for, from their rings or from the job's agent."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from unickpt.agent.hub import fetch
from unickpt.agent.starting import ADDRESS, read_address
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.clocks import on_one_clock
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.view import View, view_of
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.timing.folder import SHARED_MEMORY, own_jobs, read_folder

JSON_SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "places", metavar="DIR-or-ADDRESS", nargs="*",
        help="folders with the rings of a job's ranks, one for each host; or http://... of the job's agent, or "
        "DIR/agent, the file with that address (default: the one folder of your jobs in the shared memory of this host)",
    )  # fmt: skip
    parser.add_argument(
        "--after", type=float, metavar="SECONDS", help="how long a call may take (default: by what the job's own have taken)"
    )
    parser.add_argument("--json", action="store_true", help="the verdicts as one JSON document")


def seen_from(places: Sequence[str]) -> View:
    """The job, from the rings of its hosts, or as its agent knows it.

    Raises:
        NotACheckpointError: there are no rings in a folder.
        FormatError: an address is not an agent's, or cannot be reached.
    """
    return on_one_clock([_seen_from(place) for place in places])


def _seen_from(place: str) -> View:
    if "://" not in place and Path(place).name == ADDRESS and Path(place).is_file():
        place = read_address(Path(place).parent)
    if "://" not in place:
        return view_of(read_folder(Path(place)))
    try:
        return fetch(place)
    except OSError as err:
        raise FormatError(
            f"{place}: no agent answers there ({err}). The address is in DIR/agent on the host of rank 0"
        ) from err


def _own_folder() -> str:
    """The folder of this user's only job on this host.

    Raises:
        NotACheckpointError: there is none, or there are several.
    """
    found = own_jobs(SHARED_MEMORY)
    if len(found) == 1:
        return str(found[0])
    if not found:
        raise NotACheckpointError(f"{SHARED_MEMORY} holds no folder of a job of yours: name the folder of its rings")
    raise NotACheckpointError(
        f"{SHARED_MEMORY} holds folders of several jobs of yours; name one (the newest is last): " + ", ".join(map(str, found))
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Read and print; 0 if nothing is wrong, 1 if something is."""
    view = seen_from(args.places or [_own_folder()])
    found = examine(view, after_s=args.after)
    if args.json:
        verdicts = [
            {**dataclasses.asdict(verdict), "syndrome": verdict.syndrome.value, "told": line}
            for verdict, line in zip(found.verdicts, found.lines, strict=True)
        ]
        document = {"schema": JSON_SCHEMA, "ranks": len(view.ranks), "deadline_s": found.deadline_s, "verdicts": verdicts}
        out.json({**document, "problems": view.problems})
    else:
        for problem in view.problems:
            out.line(problem, style="yellow")
        for line in found.lines:
            out.line(line, style="red")
        if not found.lines:
            out.line(f"{len(view.ranks)} ranks: nobody waits for longer than {found.deadline_s:g} s, and nobody drags.")
    return DAMAGED if found.verdicts else SOUND
