"""``unickpt plan``: plans for the next run of a job. Each kind of plan is a subcommand with a module of its own."""

from __future__ import annotations

import argparse
from importlib import import_module

from unickpt.cli.exit_codes import DAMAGED
from unickpt.cli.output import Output

JSON_SCHEMA = 1
# plans, each with one line of help; the module ``plan_...`` has ``configure(parser)`` and ``run(args, out)``
PLANS = {
    "bits": "choose the bits of each weight under a limit of memory",
    "parallel": "choose tensor, pipeline and data parallelism and the size of a microbatch",
    "pipeline": "cut the layers into pipeline stages of even time",
    "precision": "choose the layers of slow ranks that compute in bf16",
    "ranks": "order hosts so that heavy groups avoid slow links and places",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    plans = parser.add_subparsers(metavar="PLAN", dest="plan", required=True)
    for name, help_text in PLANS.items():
        found = import_module(f"unickpt.cli.plan_{name}")
        subparser = plans.add_parser(name, help=help_text, description=f"{help_text[:1].upper()}{help_text[1:]}.")
        found.configure(subparser)
        subparser.set_defaults(run_plan=found.run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the subcommand."""
    code: int = args.run_plan(args, out)
    return code


def unmet(binds: str, text: str, args: argparse.Namespace, out: Output) -> int:
    """Say which limit no plan can meet, and return the exit code."""
    if args.json:
        out.json({"schema": JSON_SCHEMA, "unmet": {"binds": binds, "text": text}})
    else:
        out.line(f"no plan: {text}")
    return DAMAGED
