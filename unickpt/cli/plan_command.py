"""``unickpt plan``: plans for the next run of a job. Each kind of plan is a subcommand with a module of its own."""

from __future__ import annotations

import argparse
from importlib import import_module

from unickpt.cli.exit_codes import DAMAGED
from unickpt.cli.output import Output

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the subcommand."""
    code: int = import_module(f"unickpt.cli.plan_{args.plan}").run(args, out)
    return code


def unmet(binds: str, text: str, args: argparse.Namespace, out: Output) -> int:
    """Say which limit no plan can meet, and return the exit code."""
    if args.json:
        out.json({"schema": JSON_SCHEMA, "unmet": {"binds": binds, "text": text}})
    else:
        out.line(f"no plan: {text}")
    return DAMAGED
