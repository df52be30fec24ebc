"""``unickpt latest``: print the path of the newest complete checkpoint, for scripts."""

from __future__ import annotations

import argparse
import sys

from unickpt.cli.exit_codes import DAMAGED, NONE, SOUND
from unickpt.cli.locate import foreign_beside, is_file
from unickpt.cli.output import Output, one_line
from unickpt.errors import NotACheckpointError
from unickpt.load.folders import list_tags, newest
from unickpt.storage.open import open_storage

JSON_SCHEMA = 1
_SHOWN = 8  # names in a message


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory", metavar="DIR",
        help="a save directory, the output directory of a Trainer run (checkpoint-*), or a checkpoint; a path or a URL",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="path, checkpoint and step as one JSON document")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the path. Return 0 if there is one, 1 if none is complete or unickpt wrote none, 3 if there is no checkpoint.

    The file ``latest`` is not consulted: it can name a checkpoint that has lost files since.
    """
    if is_file(args.directory):
        raise NotACheckpointError(f"{args.directory}: is a file; name a directory")  # and not code 3: no first start
    directory = open_storage(args.directory).where()
    found = newest(directory)
    others = foreign_beside(directory)
    if others:
        names = ", ".join(f"{name} ({kind})" for name, kind in list(others.items())[-_SHOWN:])
        _say(f"{directory}: other programs wrote {names}; they do not count here")
    if found is not None:
        if args.json:
            out.json({"schema": JSON_SCHEMA, "path": found.path, "checkpoint": found.checkpoint, "step": found.step})
        else:
            out.text(found.path)
        return SOUND
    if args.json:
        out.json({"schema": JSON_SCHEMA, "path": None, "checkpoint": None, "step": None})
    broken = list_tags(directory)
    words = f"no complete checkpoint; {broken[-1].tag}: {broken[-1].problem}" if broken else "no checkpoint of unickpt is there"
    _say(f"{directory}: {words}")
    return DAMAGED if broken or others else NONE


def _say(text: str) -> None:
    print(f"unickpt: {one_line(text, sys.stderr)}", file=sys.stderr)
