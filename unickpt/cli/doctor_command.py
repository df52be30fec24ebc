"""``unickpt doctor``: whether unickpt acts, in what, and what to do. Text to paste into an issue, without secrets."""

from __future__ import annotations

import argparse

from unickpt.cli.doctor import answers, facts, text
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output


def run(args: argparse.Namespace, out: Output) -> int:
    """Read and print. Return 0 if all is well, 1 if something needs to be done. Advice does not count."""
    known = facts.read(args.place)
    todo = answers.actions(known)
    if args.json:
        out.json(text.document(known, todo))
    else:
        for line in text.lines(known, todo):
            out.line(line)
    return DAMAGED if any(action.needed for action in todo) else SOUND
