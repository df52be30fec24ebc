"""``unickpt latest``: print the path of the newest complete checkpoint, for scripts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from unickpt.base.errors import NotACheckpointError
from unickpt.checkpoint.load.folders import TagSummary, list_tags, newest
from unickpt.checkpoint.storage.base import is_url
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.exit_codes import DAMAGED, NONE, SOUND
from unickpt.cli.locate import TRANSFORMERS, advice_for, foreign, foreign_beside, is_file, lost, named
from unickpt.cli.output import Output, one_line

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the path. Return 0 if there is one, 1 if none is complete or unickpt wrote none, 3 if there is no checkpoint.

    The file ``latest`` is not consulted: it can name a checkpoint that has lost files since.

    With ``--witnessed`` a checkpoint that the witness has not passed counts as one that is not complete.

    Raises:
        NotACheckpointError: the directory is a file, or its storage is lost. That is not code 3: it is no first start.
    """
    if is_file(args.directory):
        raise NotACheckpointError(f"{args.directory}: is a file; name a directory")
    directory = open_storage(args.directory).where()
    found = newest(directory, witnessed=args.witnessed)
    others = foreign_beside(directory)
    if found is not None:
        if others:
            _say(f"{directory}: other programs wrote {named(others)}; they do not count here")
        if args.json:
            out.json({"schema": JSON_SCHEMA, "path": found.path, "checkpoint": found.checkpoint, "step": found.step})
        else:
            out.text(found.path)
        return SOUND
    unpassed = newest(directory) if args.witnessed else None
    if unpassed is not None:
        problem = f"no checkpoint that the witness has passed; {unpassed.checkpoint} is complete"
    else:
        problem = _problem(directory, list_tags(directory), others)
    if not problem and not is_url(directory) and (reason := lost(directory)):
        raise NotACheckpointError(f"{directory}: {reason}")
    if args.json:
        out.json({"schema": JSON_SCHEMA, "path": None, "checkpoint": None, "step": None})
    _say(f"{directory}: {problem or 'no checkpoint of unickpt is there'}")
    return DAMAGED if problem else NONE


def _problem(directory: str, broken: Sequence[TagSummary], others: dict[str, str]) -> str:
    """Return why a directory without a complete checkpoint is no first start; '' if it is one."""
    kind = foreign(directory)
    words = [f"no complete checkpoint; {broken[-1].tag}: {broken[-1].problem}"] if broken else []
    if kind and kind != TRANSFORMERS:  # a model is nothing to resume from
        words.append(f"is a checkpoint of {kind}; 'unickpt convert {shlex.quote(directory)} DIR' makes one of it")
    elif others:
        words.append(f"other programs wrote {named(others)}; {advice_for(directory, others)}")
    return "; ".join(words)


def _say(text: str) -> None:
    print(f"unickpt: {one_line(text, sys.stderr)}", file=sys.stderr)
